"""How good the server's model is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedlalr.data.population import Samples
from fedlalr.data.transforms import Transform
from fedlalr.training.work import Loss


class Evaluation(NamedTuple):
    """Mean loss and, for class targets, accuracy."""

    loss: float
    accuracy: float | None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    test: tuple[Samples, Tensor],
    loss: Loss,
    *,
    transform: Transform | None = None,
    batch_size: int = 1000,
    compute: torch.dtype | None = None,
) -> Evaluation:
    """Run a module over a test set in evaluation mode, on the device of its parameters."""
    inputs, targets = test
    device = next(model.parameters()).device
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    total, correct = torch.zeros((), device=device, dtype=torch.float64), torch.zeros((), device=device)
    has_classes = False
    try:
        for index in torch.split(torch.arange(len(targets), device=inputs.device), batch_size):
            batch = inputs[index].to(device)
            wanted = targets[index.to(targets.device)].to(device)
            with torch.autocast(device.type, compute, enabled=compute is not None):
                outputs = model(transform.test(batch) if transform is not None else batch)
                total += loss(outputs, wanted).double() * len(wanted)
            has_classes = is_class_target(outputs, wanted)
            if has_classes:
                hits = outputs.argmax(1) == wanted
                correct += hits.flatten(1).float().mean(1).sum() if hits.dim() > 1 else hits.sum()
    finally:
        for module, training in was_training.items():
            module.training = training
    count = len(targets)
    return Evaluation(float(total) / count, float(correct) / count if has_classes else None)


def is_class_target(outputs: Tensor, targets: Tensor) -> bool:
    """Whether targets are class indices for outputs `[B, classes, …]`."""
    return (
        isinstance(outputs, Tensor)
        and not targets.is_floating_point()
        and outputs.dim() == targets.dim() + 1
        and outputs.shape[2:] == targets.shape[1:]
    )
