"""The gradients of many clients at once.

A stacked gradient takes the parameters of C clients as one tensor `[C, P]` and one batch per client, and returns every
client's loss and gradient. `ForwardGradient` works for any network that can run over a stack: an ordinary module under
vmap, or a hand-written form. `LinearGradient` is written out by hand for the smallest networks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedlalr.data.trees import Tree, first_leaf, rows
from fedlalr.training.accumulation import Part, terms_of, weighted_mean
from fedlalr.training.calling import MODEL_LOSS
from fedlalr.training.interfaces import Buffers, Training
from fedlalr.training.kernels import kernels_available
from fedlalr.training.stacked.flat_gradient import FlatGradient
from fedlalr.training.stacked.forms import StackedForward
from fedlalr.training.stacked.functions import batched_functions
from fedlalr.training.stacked.masked_loss import mean_loss, without_padding
from fedlalr.training.torch_internals import without_fallback_warnings


class Batch(NamedTuple):
    """One local batch of every client of a stack."""

    inputs: Any
    """A tree of `[C, B, …]`."""
    targets: Any
    """A tree of `[C, B, …]`."""
    mask: Tensor | None = None
    """Which samples are real, bool `[C, B]`; None if all are. The rest are copies of the client's own samples."""

    def samples(self, first: int, last: int) -> Batch:
        """Some samples of every client."""
        inputs, targets = rows((self.inputs, self.targets), (slice(None), slice(first, last)))
        return Batch(inputs, targets, None if self.mask is None else self.mask[:, first:last])


StackedGradient = Callable[[Tensor, Buffers, Batch], tuple[Tensor, Tensor, Buffers]]
"""What the stacked engine needs from a network: a function of (x, buffers, batch) that returns losses `[C]`, gradients
`[C, P]` of the mean loss over each client's real samples, and the buffers afterwards.

`x` is `[C, P]` in the layout's order and dtype, `buffers` are `[C, …]` and may be written into. No client's numbers
depend on another's.
"""


def gradient_at(gradient: StackedGradient, buffers: Buffers, batch: Batch) -> Callable[[Tensor], Tensor]:
    """The gradients of one batch at any parameters `[C, P]`; the buffers do not change."""
    return lambda x: gradient(x, {name: buffer.clone() for name, buffer in buffers.items()}, batch)[1]


class ForwardGradient:
    """Runs a network over the stack; autograd differentiates it as one large computation."""

    def __init__(self, training: Training, forward: StackedForward, *, ignored: int | None = None) -> None:
        """`ignored`: the label that the caller's own loss leaves out, if there is one."""
        self.training, self.forward, self._ignored = training, forward, ignored
        self._fast = getattr(forward, "grouped", True)
        self._direct = kernels_available(training.device) and FlatGradient.pays(training.layout)

    @without_fallback_warnings()
    def __call__(self, x: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Tensor, Buffers]:
        training, inputs, targets, mask = self.training, *batch
        leaf = x.detach().requires_grad_()
        # Cached casts are useless for parameters that change in every step, and must not outlive a captured graph.
        autocast = torch.autocast(
            training.device.type, training.compute, enabled=training.compute is not None, cache_enabled=False
        )
        with torch.enable_grad():
            with autocast, self._parameters(leaf) as parameters:
                if training.loss == MODEL_LOSS:
                    targets = targets if mask is None else without_padding(targets, mask)
                    losses, after = self.forward(parameters, buffers, inputs, mask, targets)
                else:
                    outputs, after = self.forward(parameters, buffers, inputs, mask)
                    each = vmap(self._loss, (0, 0, None if mask is None else 0), randomness="different")
                    losses = each(outputs, targets, mask)
            # The gradient of the sum is each client's own: no loss depends on another client's parameters.
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        return losses.detach(), gradient, after

    def _parameters(self, leaf: Tensor) -> AbstractContextManager[dict[str, Tensor]]:
        """The parameters of the stack by name."""
        layout = self.training.layout
        direct = self._direct and leaf.is_contiguous()
        return FlatGradient(layout, leaf) if direct else nullcontext(layout.views(leaf))

    def _loss(self, outputs: Any, targets: Tree, mask: Tensor | None) -> Tensor:
        """One client's loss."""
        with batched_functions(self._fast):
            return mean_loss(self.training.loss, outputs, targets, mask, self._ignored)


class AccumulatedGradient:
    """Averages the gradients of micro-batches, so that only a few samples of each client are in memory at a time."""

    def __init__(self, training: Training, gradient: StackedGradient, size: int) -> None:
        self.training, self._gradient, self._size = training, gradient, size

    def __call__(self, x: Tensor, buffers: Buffers, batch: Batch) -> tuple[Tensor, Tensor, Buffers]:
        width = first_leaf(batch.targets).shape[1]
        if width <= self._size:
            return self._gradient(x, buffers, batch)

        def parts() -> Iterator[Part]:
            nonlocal buffers
            for first in range(0, width, self._size):
                part = batch.samples(first, first + self._size)
                losses, gradient, buffers = self._held(x, buffers, part)
                yield losses, gradient, terms_of(self.training.loss, part.targets, part.mask)

        losses, gradient = weighted_mean(parts())
        return losses, gradient, buffers

    def _held(self, x: Tensor, buffers: Buffers, part: Batch) -> tuple[Tensor, Tensor, Buffers]:
        """The gradient of a micro-batch; clients that have no sample in it keep their buffers."""
        if part.mask is None:
            return self._gradient(x, buffers, part)
        before, some = {name: buffer.clone() for name, buffer in buffers.items()}, part.mask.any(1)
        losses, gradient, after = self._gradient(x, buffers, part)
        for name, old in before.items():
            before[name] = torch.where(some.view(-1, *[1] * (old.dim() - 1)), after[name], old)
        return losses, gradient, before
