"""Replies of remote clients taken in one by one and kept in memory, to compare what deployments do on disk with."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedlalr.algorithms.slots import Slots
from fedlalr.federation.replies.payload import Expected, Reply
from fedlalr.federation.replies.screening import MAX_NORM_RATIO, Rejection, Screened, measure_reply, screen
from fedlalr.training.interfaces import Replies


def screen_reply(reply: Reply, expected: Expected) -> Replies | Rejection:
    """One remote reply as a stack of one, or why it is rejected."""
    outcome = measure_reply(reply, expected)
    return outcome if isinstance(outcome, Rejection) else outcome[0]


class Inbox:
    """Takes replies in, refuses what may not be reduced, and gives the rest as one stack when the round closes."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self._accepted: list[Replies] = []
        self._rejected: list[Rejection] = []

    @property
    def waiting(self) -> frozenset[int]:
        """The clients that were asked and have not sent anything acceptable yet."""
        return self.expected.clients - self.expected.answered

    def receive(self, reply: Reply) -> Rejection | None:
        """Take one reply in. A refused one may be sent again, an accepted one may not."""
        outcome = screen_reply(reply, self.expected)
        if isinstance(outcome, Rejection):
            self._rejected.append(outcome)
            return outcome
        self._accepted.append(outcome)
        self.expected = replace(self.expected, answered=self.expected.answered | {int(outcome.clients)})
        return None

    def fail(self, client: int, reason: str) -> None:
        """Note that a client raised, went away or was too late."""
        self._rejected.append(Rejection.because(client, reason))

    def close(self, max_norm_ratio: float | None = MAX_NORM_RATIO) -> Screened:
        """What may be reduced, in the order of the clients' ids whatever the order of arrival, and what was refused."""
        expected = self.expected
        screened = screen(
            stack(self._accepted, expected),
            expected.broadcast,
            expected.table,
            buffers=expected.buffers,
            max_norm_ratio=max_norm_ratio,
        )
        return screened._replace(rejected=tuple(sorted([*self._rejected, *screened.rejected])))


def stack(parts: list[Replies], expected: Expected) -> Replies:
    """Replies of one client each as one stack, in ascending order of their ids."""
    parts = sorted(parts, key=lambda part: int(part.clients[0]))
    x, buffers = expected.broadcast.x, expected.buffers
    if not parts:
        none = torch.empty(0, dtype=torch.int64)
        return Replies(
            clients=none,
            samples=none,
            steps=none,
            losses=torch.empty(0, dtype=torch.float64),
            slots=Slots(**{name: x.new_empty(0, len(x)) for name in expected.table.up}),
            buffers={name: like.new_empty(0, *like.shape) for name, like in buffers.items()},
            kept=Slots(),
        )
    return Replies(
        clients=torch.cat([part.clients for part in parts]),
        samples=torch.cat([part.samples for part in parts]),
        steps=torch.cat([part.steps for part in parts]),
        losses=torch.cat([part.losses for part in parts]),
        slots=Slots(**{name: torch.cat([part.slots[name] for part in parts]) for name in expected.table.up}),
        buffers={name: torch.cat([part.buffers[name] for part in parts]) for name in buffers},
        kept=Slots(),
    )
