"""Gradient checkpointing of transformer layers over a stack of clients: of Hugging Face and of `fedlalr.models`.

torch's checkpointing cannot run inside vmap. Here a layer leaves vmap, and its computation for all clients together is
checkpointed: the backward pass computes it again, with the same dropout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from fedlalr.models.transformer import Block
from fedlalr.training.stacked.functions import batched_functions
from fedlalr.training.stacked.grouped_layers import Batched
from fedlalr.training.stacked.no_dropout import NoDropout
from fedlalr.training.torch_internals import tree_flatten, tree_unflatten


class Recomputed(Batched):
    """A function of tensors whose backward pass computes it again, for all clients together."""

    @staticmethod
    def forward(run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        return run(*tensors)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], run: Callable[..., tuple[Tensor, ...]], *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        every = vmap(run, in_dims=in_dims[1:], randomness="different")
        outputs: tuple[Tensor, ...] = checkpoint(every, *tensors, use_reentrant=False)
        return outputs, (0,) * len(outputs)


def checkpointed_layers(model: nn.Module) -> list[Any]:
    """The layers for which gradient checkpointing is turned on."""
    theirs: Any = sys.modules.get("transformers.modeling_layers")
    kinds = (Block,) if theirs is None else (Block, theirs.GradientCheckpointingLayer)
    return [layer for layer in model.modules() if isinstance(layer, kinds) and layer.gradient_checkpointing]


def stack_checkpoints(model: nn.Module, fast: bool) -> None:
    """Let the checkpointed layers of a model run over a stack."""
    for layer in checkpointed_layers(model):
        plain = object.__new__(type(layer))
        plain.__dict__.update(layer.__dict__, gradient_checkpointing=False)
        layer._gradient_checkpointing_func = partial(_checkpointed, plain, fast)


def _checkpointed(layer: nn.Module, fast: bool, call: partial[Any], *args: Any) -> Any:
    """What a layer calls to be checkpointed; `call` has its keyword arguments."""
    named = dict(layer.named_parameters()) | dict(layer.named_buffers())
    values, structure = tree_flatten((named, args, call.keywords))
    places = [place for place, value in enumerate(values) if isinstance(value, Tensor)]
    structures: list[Any] = []

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(values)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        state, inputs, options = tree_unflatten(given, structure)
        with batched_functions(fast), NoDropout() if NoDropout.active else nullcontext():  # neither is on in here
            outputs, outer = tree_flatten(functional_call(layer, state, inputs, options))
        structures.append(outer)
        return tuple(outputs)

    outputs = Recomputed.apply(run, *(values[place] for place in places))
    return tree_unflatten(list(outputs), structures[0])
