"""The state of clients in the middle of a round, and how to join the replies of parts of a cohort."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.training.interfaces import Buffers


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

    def rows(self, start: int, stop: int) -> Stack:
        """Some of the clients, without copying."""
        return Stack(
            self.state.map(lambda tensor: tensor[start:stop]),
            {name: buffer[start:stop] for name, buffer in self.buffers.items()},
            self.total[start:stop],
        )

    def own(self) -> Stack:
        """A copy in its own memory."""
        return Stack(
            self.state.map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format)),
            {name: buffer.clone() for name, buffer in self.buffers.items()},
            self.total.clone(),
        )

    def join(self, finished: list[Stack]) -> Stack:
        """This stack followed by the clients that left it, the last to leave first."""
        if not finished:
            return self
        parts = [self, *reversed(finished)]
        return Stack(
            Slots(**{name: torch.cat([part.state[name] for part in parts]) for name in self.state}),
            {name: torch.cat([part.buffers[name] for part in parts]) for name in self.buffers},
            torch.cat([part.total for part in parts]),
        )


def stacked(tensor: Tensor, count: int) -> Tensor:
    """A slot as a stack `[C, P]`, from a stack or from a vector that all clients share."""
    return tensor if tensor.dim() > 1 else tensor.expand(count, -1)
