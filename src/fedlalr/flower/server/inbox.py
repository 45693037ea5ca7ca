"""The replies of one round: screened on arrival, stored on disk, reduced when the round closes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.federation.replies.payload import Expected, Rejected, Reply
from fedlalr.federation.replies.reducing import reduce_slots
from fedlalr.federation.replies.reductions import Max, Mean, Median, SlotReduction, Trimmed, clip, pieces
from fedlalr.federation.replies.screening import Rejection, clip_buffers, clip_factors, clipped_clients, measure_reply
from fedlalr.flower.server.spool import Spool
from fedlalr.training.interfaces import Replies

NUMBERS_AT_A_TIME = 1 << 24
"""Maximum number of values of a slot, over all replies, in memory during reduction."""

_BY_COORDINATE = (Mean, Max, Median, Trimmed)


@dataclass(frozen=True)
class Closed:
    """A round's replies when it closes, and the rejections."""

    accepted: Replies
    """Ascending by client; their uploads are in the spool."""
    rows: tuple[int, ...]
    """The rows of their uploads in the spool."""
    factors: Mapping[str, Sequence[float]]
    """Clipping factors of their changes, for slots and buffers with a clipped change."""
    clipped: tuple[int, ...]
    """The clients with a clipped change."""
    rejected: tuple[Rejection, ...]


class SpooledInbox:
    """Receives replies one by one, in any order. Only one upload at a time is in memory, the others are on disk."""

    def __init__(self, expected: Expected, folder: str | Path | None = None) -> None:
        self.expected = expected
        layout = expected.layout
        self._spool = Spool(tuple(expected.table.up), layout.size, layout.dtype, folder)
        self._parts: list[Replies] = []
        self._norms: list[dict[str, list[float]]] = []
        self._rejected: list[Rejection] = []

    def receive(self, reply: Reply) -> Rejection | None:
        """Accept one reply, or return the reason for rejecting it."""
        expected = self.expected
        outcome = measure_reply(reply, expected)
        if isinstance(outcome, Rejection):
            self._rejected.append(outcome)
            return outcome
        replies, measured = outcome
        self._norms.append(measured.norms)
        self._spool.append(replies.slots.map(lambda tensor: tensor[0]))
        self._parts.append(replace(replies, slots=Slots()))
        self.expected = replace(expected, answered=expected.answered | {int(replies.clients)})
        return None

    def reject(self, client: int, reason: str | Rejected) -> None:
        """Record that a client raised an error, disconnected, was too late or sent an unreadable reply."""
        self._rejected.append(Rejection.because(client, reason))

    def close(self, max_norm_ratio: float | None) -> Closed:
        """Sort the accepted replies by client id, and find the changes that are too long for this cohort."""
        ids = [int(part.clients[0]) for part in self._parts]
        rows = sorted(range(len(ids)), key=lambda row: ids[row])
        norms = {name: [self._norms[row][name][0] for row in rows] for name in (self._norms or [{}])[0]}
        factors = clip_factors(norms, max_norm_ratio, self.expected.broadcast)
        none = torch.empty(0, dtype=torch.int64)
        empty = Replies(none, none, none, none.double(), Slots(), {}, Slots())
        accepted = Replies.cat([empty, *self._parts])
        buffers = clip_buffers(accepted.buffers, self.expected.buffers, factors)
        clipped = clipped_clients(accepted.clients, factors)
        return Closed(replace(accepted, buffers=buffers), tuple(rows), factors, clipped, tuple(sorted(self._rejected)))

    def reduce(self, closed: Closed, share: Tensor, how: Mapping[str, SlotReduction]) -> Slots:
        """Every uploaded slot reduced over the accepted replies, like `reduce_slots` with all replies in memory."""
        table, broadcast = self.expected.table, self.expected.broadcast
        reduced = {}
        for name in table.up:
            chosen = {name: how[name]} if name in how else {}
            alone = replace(table, up={name: table.up[name]}, grows=(), follows=None)
            factors = closed.factors.get(name, ())
            parts = []
            for start, stop in _pieces(self._spool.size, len(closed.rows), chosen.get(name)):
                values = self._spool.read(name, closed.rows, start, stop).to(broadcast.x.device)
                part = broadcast.map(lambda flat, start=start, stop=stop: flat[start:stop])  # type: ignore[misc]
                uploads = Slots(**{name: clip(values, part.get(name), factors)})
                parts.append(reduce_slots(uploads, part, share, alone, chosen)[name])
            reduced[name] = torch.cat(parts)
        return Slots(**reduced)

    def upload(self, row: int) -> Slots:
        """One accepted upload, as a stack of one."""
        size, where = self._spool.size, self.expected.broadcast.x.device
        return Slots(**{name: self._spool.read(name, [row], 0, size).to(where) for name in self.expected.table.up})

    def dispose(self) -> None:
        """Free the disk space."""
        self._spool.close()


def _pieces(size: int, count: int, how: SlotReduction | None) -> Sequence[tuple[int, int]]:
    """The ranges of coordinates to reduce at a time: everything at once for reductions over whole uploads."""
    if how is not None and not isinstance(how, _BY_COORDINATE):
        return [(0, size)]
    return pieces(size, NUMBERS_AT_A_TIME // count)
