"""The state of clients in the middle of a round, and how to join the replies of parts of a cohort."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.training.interfaces import Buffers, joined


@dataclass(frozen=True)
class Stack:
    """The state of C clients."""

    state: Slots
    """`[C, P]`"""
    buffers: Buffers
    """`[C, …]`"""
    total: Tensor
    """Sum of the training losses so far, `[C]`."""

    @property
    def size(self) -> int:
        return len(self.total)

    def map(self, function: Callable[[Tensor], Tensor]) -> Stack:
        """Apply a function to every tensor."""
        buffers = {name: function(buffer) for name, buffer in self.buffers.items()}
        return Stack(self.state.map(function), buffers, function(self.total))

    def rows(self, start: int, stop: int) -> Stack:
        """Some of the clients, without copying."""
        return self.map(lambda tensor: tensor[start:stop])

    def own(self) -> Stack:
        """A copy in its own memory."""
        return self.map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))

    def join(self, finished: list[Stack]) -> Stack:
        """This stack followed by the clients that left it, the last to leave first."""
        if not finished:
            return self
        parts = [self, *reversed(finished)]
        state, buffers = joined([part.state for part in parts]), joined([part.buffers for part in parts])
        return Stack(Slots(**state), buffers, torch.cat([part.total for part in parts]))


def stacked(tensor: Tensor, count: int) -> Tensor:
    """A slot as a stack `[C, P]`, from a stack or from a vector that all clients share."""
    return tensor if tensor.dim() > 1 else tensor.expand(count, -1)
