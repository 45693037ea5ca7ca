"""How good the server's model is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedlalr.data.population import Samples
from fedlalr.data.transforms import Transform
from fedlalr.training.ranks import ALONE, Ranks
from fedlalr.training.stacked_forms import inference_form
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
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Run a module over a test set in evaluation mode, on the device of its parameters; each rank over its share."""
    inputs, targets = test
    device = next(model.parameters()).device
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    tally = torch.zeros(3, device=device, dtype=torch.float64)  # loss, hits, batches with classes
    batches = torch.split(torch.arange(len(targets), device=inputs.device), batch_size)
    forward: Callable[[Tensor], Tensor] | None = None
    try:
        for index in batches[ranks.rank :: ranks.count]:
            batch = inputs[index].to(device)
            batch = transform.test(batch) if transform is not None else batch
            if forward is None:
                forward = inference_form(model, compute, batch.shape[1:]) or partial(_run_module, model)
            wanted = targets[index.to(targets.device)].to(device)
            with torch.autocast(device.type, compute, enabled=compute is not None):
                outputs = forward(batch)
                tally[0] += loss(outputs, wanted).double() * len(wanted)
            if is_class_target(outputs, wanted):
                # the argmax of NaN is class 0: what is no answer is no right one
                hits = (outputs.argmax(1) == wanted) & outputs.amax(1).isfinite()
                tally[1] += hits.flatten(1).float().mean(1).sum() if hits.dim() > 1 else hits.sum()
                tally[2] += 1
    finally:
        for module, training in was_training.items():
            module.training = training
    total, correct, classed = ranks.sum({"tally": tally})["tally"].tolist()
    return Evaluation(total / len(targets), correct / len(targets) if classed else None)


def _run_module(model: nn.Module, batch: Tensor) -> Tensor:
    if batch.is_cuda and batch.dim() == 4:
        batch = batch.contiguous(memory_format=torch.channels_last)  # where most convolutions are faster
    outputs: Tensor = model(batch)
    return outputs


def is_class_target(outputs: Tensor, targets: Tensor) -> bool:
    """Whether targets are class indices for outputs `[B, classes, …]` of more than one class."""
    return (
        isinstance(outputs, Tensor)
        and not targets.is_floating_point()
        and outputs.dim() == targets.dim() + 1
        and outputs.shape[1] > 1
        and outputs.shape[2:] == targets.shape[1:]
    )
