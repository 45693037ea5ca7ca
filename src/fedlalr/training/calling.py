"""How a model is called on a batch, and what is read from its outputs. Every engine and the evaluation use this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from fedlalr.data.collating import NextTokens, Target
from fedlalr.data.trees import Tree
from fedlalr.hf import is_causal
from fedlalr.training.stacked.masked_loss import ignored_label

MODEL_LOSS: Literal["model"] = "model"
"""The value of the option `loss` for the loss that the model computes itself."""
LABELS = "labels"
"""The argument for a single tensor of targets, if the model computes the loss."""


def arguments(inputs: Tree, targets: Tree | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of a model for a batch; also its targets, if the model computes the loss.

    >>> arguments({"ids": 1, "mask": 2}), arguments((1, 2)), arguments(1, targets=2)
    (((), {'ids': 1, 'mask': 2}), ((1, 2), {}), ((1,), {'labels': 2}))
    """
    named = {} if targets is None else dict(targets) if isinstance(targets, dict) else {LABELS: targets}
    if isinstance(inputs, dict):
        return (), inputs | named
    return (inputs if isinstance(inputs, tuple) else (inputs,)), named


def call(model: Callable[..., Any], inputs: Tree, targets: Tree | None = None) -> Any:
    """The model's outputs: a dict is passed as `model(**inputs)`, a tuple as `model(*inputs)`."""
    positional, named = arguments(inputs, targets)
    return model(*positional, **named)


def outputs_of(model: Callable[..., Any], loss: Any, inputs: Tree, targets: Tree) -> Any:
    """The model's outputs for a batch; if it computes the loss itself, it gets the targets, too."""
    return call(model, inputs, targets if loss == MODEL_LOSS else None)


def prediction(outputs: Any) -> Any:
    """What the caller's losses and metrics use: the `logits` of outputs that have them, else the outputs themselves."""
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs)


def classes_first(outputs: Any) -> Any:
    """The same with the classes where torch's cross entropy and the accuracy look for them: `[B, classes, …]`.

    Logits of tokens, as Hugging Face models return them, are `[B, T, classes]`.
    """
    logits = prediction(outputs)
    is_tokens = logits is not outputs and isinstance(logits, Tensor) and logits.dim() == 3
    return logits.movedim(-1, 1) if is_tokens else logits


def for_loss(outputs: Any, loss: Any) -> Any:
    """The outputs in the form that a loss takes: torch's cross entropy needs the classes first."""
    return prediction(outputs) if ignored_label(loss) is None else classes_first(outputs)


def target_of(model: nn.Module, loss: Any, target: Target | None) -> Target | None:
    """How to find the targets in a dict for a model: torch's cross entropy needs those of a causal language model moved
    by one place; other losses take them as they are."""
    ignored = ignored_label(loss)
    if ignored is not None and is_causal(model) and (target is None or isinstance(target, str)):
        return NextTokens(target, ignored)
    return target


def own_loss(outputs: Any) -> Tensor:
    """The loss that a model computed itself, as one number."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        given = f"a loss of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else "no loss"
        raise ValueError(
            f"with loss='model' the model must return an object whose loss is one number, as Hugging Face models do; "
            f"this one returned a {type(outputs).__name__} with {given}"
        )
    return loss.reshape(())


def outputs_and_loss(model: Callable[..., Any], loss: Any, inputs: Tree, targets: Tree) -> tuple[Any, Tensor]:
    """What the model returns for a batch, and the loss: the caller's, or the model's own.

    torch's cross entropy would round its result as the logits are, to three digits in bfloat16.
    """
    outputs = outputs_of(model, loss, inputs, targets)
    if loss == MODEL_LOSS:
        return outputs, own_loss(outputs)
    read = for_loss(outputs, loss)
    is_rounded = ignored_label(loss) is not None and isinstance(read, Tensor) and read.dtype.itemsize == 2
    return outputs, loss(read.float() if is_rounded else read, targets)


def batch_loss(model: Callable[..., Any], loss: Any, inputs: Tree, targets: Tree) -> Tensor:
    """The loss of a batch."""
    return outputs_and_loss(model, loss, inputs, targets)[1]
