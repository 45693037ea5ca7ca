"""The gradients of many clients at once.

A stacked gradient takes the parameters of C clients as one tensor `[C, P]` and one batch per client, and returns every
client's loss and gradient. `ForwardGradient` works for any network that can run over a stack: an ordinary module under
vmap, or a hand-written form. `LinearGradient` is written out by hand for the smallest networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from fedlalr.training.interfaces import Buffers, Training
from fedlalr.training.stacked.forms import StackedForward
from fedlalr.training.stacked.functions import batched_functions
from fedlalr.training.stacked.masked_loss import mean_loss
from fedlalr.training.torch_internals import without_fallback_warnings


class Batch(NamedTuple):
    """One local batch of every client of a stack."""

    inputs: Tensor
    """`[C, B, …]`"""
    targets: Tensor
    """`[C, B, …]`"""
    mask: Tensor | None = None
    """Which samples are real, bool `[C, B]`; None if all are. The rest are copies of the client's own samples."""


class StackedGradient(Protocol):
    """What the stacked engine needs from a network."""

    def __call__(self, x: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Tensor, Buffers]:
        """Losses `[C]`, gradients `[C, P]` of the mean loss over each client's real samples, and the buffers
        afterwards.

        `x` is `[C, P]` in the layout's order and dtype, `buffers` are `[C, …]` and may be written into. No client's
        numbers depend on another's.
        """
        ...


def gradient_at(gradient: StackedGradient, buffers: Buffers, batch: Batch) -> Callable[[Tensor], Tensor]:
    """The gradients of one batch at any parameters `[C, P]`; the buffers do not change."""
    return lambda x: gradient(x, {name: buffer.clone() for name, buffer in buffers.items()}, batch)[1]


class ForwardGradient:
    """Runs a network over the stack; autograd differentiates it as one large computation."""

    def __init__(self, training: Training, forward: StackedForward) -> None:
        self.training, self.forward = training, forward
        self._fast = getattr(forward, "grouped", True)
        self._losses = vmap(self._loss, in_dims=(0, 0, None), randomness="different")
        self._masked_losses = vmap(self._loss, in_dims=(0, 0, 0), randomness="different")

    @without_fallback_warnings()
    def __call__(self, x: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Tensor, Buffers]:
        training, inputs, targets, mask = self.training, *batch
        leaf = x.detach().requires_grad_()
        losses_of = self._losses if mask is None else self._masked_losses
        # Cached casts are useless for parameters that change in every step, and must not outlive a captured graph.
        autocast = torch.autocast(
            training.device.type, training.compute, enabled=training.compute is not None, cache_enabled=False
        )
        with torch.enable_grad():
            with autocast:
                outputs, after = self.forward(training.layout.views(leaf), buffers, inputs, mask)
                losses = losses_of(outputs, targets, mask)
            # The gradient of the sum is each client's own: no loss depends on another client's parameters.
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient, after

    def _loss(self, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """One client's loss."""
        with batched_functions(self._fast):
            return mean_loss(self.training.loss, outputs, targets, mask)
