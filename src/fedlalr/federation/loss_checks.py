"""Rejects losses and targets that do not fit each other or the model, before any training starts."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedlalr.data.population import Clients, Population
from fedlalr.data.trees import Tree, first_leaf, named_leaves
from fedlalr.federation.evaluation import is_class_target
from fedlalr.training.calling import MODEL_LOSS
from fedlalr.training.interfaces import Training
from fedlalr.training.options import Loss
from fedlalr.training.stacked.masked_loss import ignored_label
from fedlalr.training.torch_internals import DispatchMode

_NO_CLASS = 255
"""Marks pixels without a label in image masks."""


def check_targets(outputs: Tensor, targets: Tree, clients: Clients, ignored: int, whose: str, owner: str) -> None:
    """Reject targets that cross-entropy cannot learn: of all clients if they are in one pool."""
    _check_classes(outputs, targets, whose)
    if is_class_target(outputs, targets):
        if isinstance(clients, Population):
            _check_labels(clients, outputs.shape[1], ignored, owner)
    elif isinstance(targets, Tensor) and targets.shape == outputs.shape:
        pool = clients.targets if isinstance(clients, Population) else targets
        _check_probabilities(first_leaf(pool))


def _check_classes(outputs: Tensor, targets: Tree, whose: str) -> None:
    """Reject problems that cross-entropy cannot learn: a single class, or labels that are not whole numbers."""
    if outputs.dim() > 1 and outputs.shape[1] == 1:
        raise ValueError(
            f"the model has one output, {tuple(outputs.shape)}, and the cross-entropy of a single class is always 0; "
            f"give it an output for each class, or pass another loss, such as "
            f"loss=torch.nn.functional.binary_cross_entropy_with_logits or mse_loss"
        )
    per_sample = isinstance(targets, Tensor) and targets.shape == outputs.shape[:1] + outputs.shape[2:]
    if per_sample and first_leaf(targets).is_floating_point():
        raise ValueError(
            f"{whose} targets are {kind(targets)}, but cross-entropy needs class labels as whole numbers; use "
            f"targets.long(), or another loss such as loss=torch.nn.functional.mse_loss"
        )


def _check_probabilities(targets: Tensor) -> None:
    """Reject numbers and several labels per sample where cross-entropy expects the probability of each class."""
    sums = targets.sum(1, dtype=torch.float64)
    if bool((targets < 0).any() | ((sums - 1).abs() > 0.01).logical_and(sums != 0).any()):
        raise ValueError(
            "the targets have one number for each class, but these are not probabilities, which cross-entropy needs: "
            "they are negative or do not sum to 1; pass another loss, such as loss=torch.nn.functional.mse_loss for "
            "numbers or binary_cross_entropy_with_logits for several labels per sample, or loss='model' if the model "
            "has its own"
        )


def check_loss(training: Training, outputs: Any, targets: Tree, whose: str) -> None:
    """Reject a loss that raises, is not one number, has no gradient, or pairs every output with every target."""
    assert training.loss != MODEL_LOSS
    if isinstance(training.loss, type):
        raise ValueError(f"loss is the class {training.loss.__name__}; pass an instance, {training.loss.__name__}()")
    keywords = training.loss.keywords if isinstance(training.loss, partial) else {}
    if keywords.get("reduction", getattr(training.loss, "reduction", None)) == "sum":
        raise ValueError(
            "the loss sums over a batch (reduction='sum'), so its gradient would grow with the batch; "
            "leave reduction out for the mean"
        )
    module = training.loss if isinstance(training.loss, nn.Module) else nn.Module()
    own = [name for name, value in module.named_parameters() if value.requires_grad]
    if own:
        raise ValueError(
            f"the loss has parameters, such as {own[0]}, which would not be trained; make them part of the model, "
            f"or freeze them with loss.requires_grad_(False)"
        )
    shapes = f"the model's outputs, {kind(outputs)}, and {whose} targets, {kind(targets)}"
    differentiable = isinstance(outputs, Tensor) and outputs.is_floating_point()
    if differentiable:
        outputs = outputs.detach().requires_grad_().clone()  # a loss may write into it, but not into a leaf
    try:
        with (
            torch.enable_grad(),
            torch.autocast(training.device.type, training.compute, enabled=training.compute is not None),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("error", "Using a target size")  # torch's warning that it broadcasts shapes
            loss = training.loss(outputs, targets)
    except UserWarning as warning:
        raise ValueError(_broadcast_error(shapes, outputs, targets)) from warning
    except Exception as error:
        hint = ""
        if not isinstance(targets, Tensor):
            hint = "; the loss gets the targets as they are, here " + type(targets).__name__
        elif isinstance(outputs, tuple):
            hint = (
                "; the model returns a tuple: a Hugging Face model gives its logits with return_dict=True, for others "
                "name the part, such as "
                "loss=lambda outputs, targets: torch.nn.functional.cross_entropy(outputs[0], targets)"
            )
        elif targets.dtype in (torch.bool, torch.int8, torch.int16, torch.int32):
            hint = "; labels must be int64, so use targets.long()"
        elif ignored_label(training.loss) is not None and targets.dtype == torch.int64 and targets.shape[1:] == (1,):
            hint = "; a label is one number per sample, so use targets.squeeze(1)"
        elif ignored_label(training.loss) is not None and isinstance(outputs, Tensor):
            hint = _hint_at_positions(training.model, outputs, targets)
        raise ValueError(f"the loss cannot be computed from {shapes}: {type(error).__name__}: {error}{hint}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"the loss must be a tensor with one number, the mean over the batch, not {kind(loss)}; "
            f"torch's losses return that with reduction='mean'"
        )
    if differentiable and not loss.requires_grad:
        raise ValueError(
            "the loss has no gradient with respect to the model's outputs, so nothing can be learned; leave out "
            "detach, item, argmax and comparisons, or pass such a function as metrics={'name': function}"
        )
    if _broadcasts(training.loss, outputs, targets):
        raise ValueError(_broadcast_error(shapes, outputs, targets))


def _hint_at_positions(model: nn.Module, outputs: Tensor, targets: Tensor) -> str:
    """What to do about outputs whose positions, such as tokens or pixels, are not those of the labels."""
    if outputs.dim() != targets.dim() + 1 or outputs.dim() < 3:
        return ""
    if outputs.shape[:-1] == targets.shape:
        return "; cross-entropy needs the classes second, so let the model return outputs.movedim(-1, 1)"
    if "labels" in inspect.signature(model.forward).parameters:
        return "; if the model's own loss pairs them, as that of prompt tuning does, use loss='model'"
    return ""


def _broadcast_error(shapes: str, outputs: object, targets: object) -> str:
    example = ""
    if isinstance(outputs, Tensor):
        how = "squeeze(-1)" if first_leaf(targets).dim() > outputs.dim() else "unsqueeze(1)"
        example = f", for example with targets.{how}"
    return (
        f"the loss would broadcast {shapes}, instead of pairing them one by one; give the targets the shape of the "
        f"outputs{example}"
    )


class _Pairing(DispatchMode):
    """Notes whether an operation combines `[N, 1]` with `[N]` into `[N, N]`."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() == 2:
            n, shapes = len(result), [tuple(each.shape) for each in args if isinstance(each, Tensor)]
            self.found |= result.shape == (n, n) and (n, 1) in shapes and (n,) in shapes
        return result


def _broadcasts(loss: Loss, outputs: object, targets: object) -> bool:
    """Whether a caller's own loss combines every output with every target, which torch does not warn of: outputs
    `[N, 1]` with targets `[N]`, or the reverse, so that the order of the targets does not matter."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or not targets.is_floating_point():
        return False
    if outputs.dim() + targets.dim() != 3 or outputs.numel() != targets.numel():
        return False
    if len(targets) == 1:
        outputs, targets = torch.cat([outputs] * 2), torch.cat([targets] * 2)
    with _Pairing() as pairing:
        value = loss(outputs, targets)
    return pairing.found and torch.allclose(value, loss(outputs, targets.flip(0)))


def kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if type(value) in (dict, tuple):
        parts = ", ".join(f"{name} {kind(leaf)}" for name, leaf in named_leaves(value).items())
        return f"{type(value).__name__} of {parts}"
    return type(value).__name__


def _check_labels(clients: Population, classes: int, ignored: int, owner: str) -> None:
    outside = ((clients.targets < 0) | (clients.targets >= classes)) & (clients.targets != ignored)
    if not outside.any():
        return
    for client, rows in enumerate(clients.partition):
        own = torch.as_tensor(rows, device=outside.device)
        wrong = clients.targets[own][outside[own]]
        if len(wrong):
            label = int(wrong[0])
            ignore = f", or ignore such targets with loss=torch.nn.CrossEntropyLoss(ignore_index={label})"
            raise ValueError(
                f"{owner.format(client)} has label {label}, but the model has classes 0 to {classes - 1}; fix the "
                f"labels or give the model more outputs{'' if 0 <= label < _NO_CLASS else ignore}"
            )
