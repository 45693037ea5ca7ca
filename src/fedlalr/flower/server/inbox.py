"""The replies of one round: screened as they come, kept on disk, reduced when the round closes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.federation.replies.payload import Expected, Refused, Reply
from fedlalr.federation.replies.reducing import reduce_slots
from fedlalr.federation.replies.reductions import Max, Mean, Median, SlotReduction, Trimmed, clip, pieces
from fedlalr.federation.replies.screening import Measured, Rejection, clip_buffers, clipped_clients, measure_reply
from fedlalr.flower.server.spool import Spool
from fedlalr.training.interfaces import Buffers, Replies

NUMBERS_AT_A_TIME = 1 << 24
"""Numbers of a slot, over all replies, that are in memory while it is reduced."""

_BY_COORDINATE = (Mean, Max, Median, Trimmed)


@dataclass(frozen=True)
class Closed:
    """A round's replies when it closes: what may be reduced, ascending by client, and what may not."""

    clients: Tensor
    """Ids of the accepted, int64 `[R]`."""
    samples: Tensor
    steps: Tensor
    losses: Tensor
    buffers: Buffers
    """`[R, …]`."""
    rows: tuple[int, ...]
    """Where their uploads lie in the spool."""
    factors: Mapping[str, Sequence[float]]
    """By how much their changes are shortened, for the slots and buffers of which one is."""
    clipped: tuple[int, ...]
    """The clients of which one is."""
    rejected: tuple[Rejection, ...]
    replied: int
    """Replies with an upload of the right form."""


class SpooledInbox:
    """Takes replies in one by one, in any order. Holds one upload in memory at a time, the others on disk."""

    def __init__(self, expected: Expected, folder: str | Path | None = None) -> None:
        self.expected = expected
        layout = expected.layout
        self._spool = Spool(tuple(expected.table.up), layout.size, layout.dtype, folder)
        self._parts: list[Replies] = []
        self._measured: list[Measured] = []
        self._rejected: list[Rejection] = []

    @property
    def waiting(self) -> frozenset[int]:
        """The clients that were asked and have not sent anything acceptable yet."""
        return self.expected.clients - self.expected.answered

    def receive(self, reply: Reply) -> Rejection | None:
        """Take one reply in, or say why not."""
        expected = self.expected
        outcome = measure_reply(reply, expected)
        if isinstance(outcome, Rejection):
            self._rejected.append(outcome)
            return outcome
        replies, measured = outcome
        self._measured.append(measured)
        self._spool.append(replies.slots.map(lambda tensor: tensor[0]))
        self._parts.append(replace(replies, slots=Slots()))
        self.expected = replace(expected, answered=expected.answered | {int(replies.clients)})
        return None

    def refuse(self, client: int, reason: str | Refused) -> Rejection:
        """Note that a client raised, went away, was too late or sent something unreadable."""
        self._rejected.append(Rejection.because(client, reason))
        return self._rejected[-1]

    def close(self, max_norm_ratio: float | None) -> Closed:
        """Put the accepted replies in the order of their ids, and see which changes are too long for this cohort."""
        ids = [int(part.clients[0]) for part in self._parts]
        rows = sorted(range(len(ids)), key=lambda row: ids[row])
        parts = [self._parts[row] for row in rows]
        measured = [self._measured[row] for row in rows]
        factors = _together(measured).factors(max_norm_ratio, self.expected.broadcast) if measured else {}
        none = torch.empty(0, dtype=torch.int64)
        clients = torch.cat([none, *(part.clients for part in parts)])
        buffers = {name: torch.cat([part.buffers[name] for part in parts]) for name in self.expected.buffers if parts}
        return Closed(
            clients=clients,
            samples=torch.cat([none, *(part.samples for part in parts)]),
            steps=torch.cat([none, *(part.steps for part in parts)]),
            losses=torch.cat([none.double(), *(part.losses for part in parts)]),
            buffers=clip_buffers(buffers, self.expected.buffers, factors),
            rows=tuple(rows),
            factors=factors,
            clipped=clipped_clients(clients, factors),
            rejected=tuple(sorted(self._rejected)),
            replied=len(ids),
        )

    def reduce(self, closed: Closed, share: Tensor, how: Mapping[str, SlotReduction]) -> Slots:
        """Every uploaded slot reduced over the accepted replies, as `reduce_slots` does it with all in memory."""
        table, broadcast = self.expected.table, self.expected.broadcast
        reduced = {}
        for name in table.up:
            chosen = {name: how[name]} if name in how else {}
            alone = replace(table, up={name: table.up[name]}, grows=())
            factors = closed.factors.get(name, ())
            parts = []
            for start, stop in _pieces(self._spool.size, len(closed.rows), chosen.get(name)):
                values = self._spool.read(name, closed.rows, start, stop).to(broadcast.x.device)
                part = broadcast.map(lambda flat, start=start, stop=stop: flat[start:stop])  # type: ignore[misc]
                uploads = Slots(**{name: clip(values, part.get(name), factors)})
                parts.append(reduce_slots(uploads, part, share, alone, chosen)[name])
            reduced[name] = torch.cat(parts)
        return Slots(**reduced)

    def dispose(self) -> None:
        """Give the disk space back."""
        self._spool.close()


def _pieces(size: int, count: int, how: SlotReduction | None) -> Sequence[tuple[int, int]]:
    """The stretches of coordinates to reduce at a time. A reduction that looks at whole uploads gets them whole."""
    if how is not None and not isinstance(how, _BY_COORDINATE):
        return [(0, size)]
    return pieces(size, NUMBERS_AT_A_TIME // count)


def _together(parts: Sequence[Measured]) -> Measured:
    """What was measured of the replies one by one, as of one stack."""

    def joined(which: str) -> dict[str, list[Any]]:
        tables: list[dict[str, list[Any]]] = [getattr(part, which) for part in parts]
        return {name: [one for table in tables for one in table[name]] for name in tables[0]}

    return Measured(joined("finite"), joined("fell"), joined("norms"))
