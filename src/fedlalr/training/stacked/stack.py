"""The state of clients in the middle of a round, and how to join the replies of parts of a cohort."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.training.interfaces import Buffers, Replies


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


def join_replies(parts: list[Replies]) -> Replies:
    """Join the replies of several parts of a cohort, ordered by client id."""
    if len(parts) == 1:
        return parts[0]
    failures = {client: reason for part in parts for client, reason in part.failures.items()}
    traces = [trace for part in parts for trace in part.traces]
    parts = [part for part in parts if len(part.clients)] or parts[:1]  # an empty part has no dtypes
    clients = torch.cat([part.clients for part in parts])
    whole = Replies(
        clients=clients,
        samples=torch.cat([part.samples for part in parts]),
        steps=torch.cat([part.steps for part in parts]),
        losses=torch.cat([part.losses for part in parts]),
        slots=Slots(**{name: torch.cat([part.slots[name] for part in parts]) for name in parts[0].slots}),
        buffers={name: torch.cat([part.buffers[name] for part in parts]) for name in parts[0].buffers},
        kept=Slots(**{name: torch.cat([part.kept[name] for part in parts]) for name in parts[0].kept}),
        failures=failures,
        traces=tuple(sorted(traces, key=lambda trace: trace[:2])),
    )
    return whole if bool((clients[1:] > clients[:-1]).all()) else whole.rows(clients.argsort())
