"""Decides which replies are reduced and how far each may move the server, in simulations and in deployments.

A reply that no honest client can send (numbers that are not finite, a v̂ below its broadcast) is rejected as a whole
and recorded with its client and the reason. Every other reply counts, but a change that is too long is clipped: it
keeps its direction and is shortened to `max_norm_ratio` times the scale of its slot,

    scale = max(median over the replies of ‖change‖, SHARE · ‖broadcast‖).

In an ordinary cohort, changes are far below that, and replies keep every bit. Norms are taken of whole slots, not of
coordinates, in which honest clients differ by orders of magnitude. The share of the broadcast (of x, for a slot that is
not broadcast) is for clients that still learn after most others have converged: the median alone would shut them out.
Buffers have no such share, since nothing is learned through them: a buffer that most clients do not change stays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.common.printable import printable
from fedlalr.federation.replies.payload import Expected, Rejected, Reply, client_of, unpack
from fedlalr.federation.replies.reductions import as_rows, change_norms, clip, norms_and_falls, shortening
from fedlalr.training.interfaces import Buffers, Replies, Work, real_numbers
from fedlalr.training.personal import BUFFER as LOCAL
from fedlalr.training.ranks import Spread

MAX_NORM_RATIO = 10.0
"""Honest clients of equal size changed x and m by less than this (7.1 times the scale in 30 rounds of every method on
the quickstart; v̂ not always), and one hostile client of fifty moves a mean by at most a fifth of an ordinary change."""

SEVERAL = 3
"""A client that is rejected in this many of its rounds in a row is reported: once or twice may be an accident."""

VARIANCE, COUNT = "running_var", "num_batches_tracked"
"""Buffers of torch's normalisation layers: the running variance, which is never negative, and the number of batches,
which can only grow."""


Key = tuple[str, str]
"""What is measured, and the slot it is measured of."""
BUFFER = "buffer "
"""Prefix of buffers' names among the names of slots."""


LONGEST_REASON = 1000
"""Characters of an error that are recorded: a client's error may be of any length."""


class Rejection(NamedTuple):
    """A client whose reply was left out, and why."""

    client: int
    reason: str

    @classmethod
    def because(cls, client: int, reason: object) -> Rejection:
        """A rejection with a reason from outside, made safe to record: of bounded length, valid and printable."""
        text = str(reason)
        text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"
        return cls(client, printable(text.encode(errors="backslashreplace").decode()))


OnRejected = Callable[[Work, Sequence[Rejection]], None]
"""Called with the work of a round and its rejected replies."""


class Streaks:
    """Counts in how many of its rounds in a row each client was rejected."""

    def __init__(self) -> None:
        self._running: Counter[int] = Counter()

    def update(self, cohort: Iterable[int], rejected: Iterable[Rejection]) -> tuple[int, ...]:
        """The clients of a round's cohort that have been rejected in at least `SEVERAL` of their rounds in a row."""
        out = {rejection.client for rejection in rejected}
        for client in cohort:
            self._running[client] = self._running[client] + 1 if client in out else 0
        return tuple(sorted(client for client in out if self._running[client] >= SEVERAL))


class Screened(NamedTuple):
    """A cohort's replies after screening."""

    accepted: Replies
    """The replies to reduce, with long changes clipped."""
    rejected: tuple[Rejection, ...]
    clipped: tuple[int, ...]
    """Accepted clients with a clipped change. Both in ascending order."""


def screen(
    replies: Replies,
    broadcast: Slots,
    table: SlotTable,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    max_norm_ratio: float | None = MAX_NORM_RATIO,
) -> Screened:
    """Screen a whole cohort."""
    buffers = buffers or {}
    failures = [Rejection.because(client, reason) for client, reason in replies.failures.items()]
    if not len(replies.clients):
        return Screened(replies, tuple(sorted(failures)), ())
    reasons, norms = Measured.of(replies, broadcast, table, buffers)
    ids: list[int] = replies.clients.tolist()
    rejected = tuple(sorted([*failures, *(Rejection(ids[row], reason) for row, reason in reasons.items())]))
    if reasons:
        good = [row for row in range(len(ids)) if row not in reasons]
        replies = replies.rows(torch.tensor(good, dtype=torch.int64, device="cpu"))
        norms = {name: [each[row] for row in good] for name, each in norms.items()}
    factors = clip_factors(norms, max_norm_ratio, broadcast)
    if factors:
        mine = {name: each[replies.spread.held] for name, each in factors.items()}
        slots = {name: clip(each, broadcast.get(name), mine.get(name, ())) for name, each in replies.slots.items()}
        replies = replace(replies, slots=Slots(**slots), buffers=clip_buffers(replies.buffers, buffers, mine))
    return Screened(replies, rejected, clipped_clients(replies.clients, factors))


def measure_reply(reply: Reply, expected: Expected) -> tuple[Replies, Measured] | Rejection:
    """One remote reply as a stack of one with its measurements, or why it is rejected. Clipping needs the cohort."""
    try:
        replies = unpack(reply, expected)
    except Rejected as reason:
        return Rejection(client_of(reply), str(reason))
    measured = Measured.of(replies, expected.broadcast, expected.table, expected.buffers)
    return Rejection(client_of(reply), measured.reasons[0]) if measured.reasons else (replies, measured)


class Measured(NamedTuple):
    """What the rules need to know about a stack of replies, on the host."""

    reasons: dict[int, str]
    """Row → reason, for each rejected reply."""
    norms: dict[str, list[float]]
    """Norm of the change of each slot and float buffer, one number for each reply."""

    @classmethod
    def of(cls, replies: Replies, broadcast: Slots, table: SlotTable, buffers: Mapping[str, Tensor]) -> Measured:
        """Measure on the device. If everything is finite, a single copy to the host is the only synchronisation."""
        # local buffers stay with their client and harm nobody else
        kept = {f"kept {name}": each for name, each in replies.kept.items() if not name.startswith(LOCAL)}
        values = dict(replies.slots.items()) | buffer_changes(replies.buffers, buffers) | kept
        rows: dict[Key, Tensor] = {}
        for name, value in values.items():
            if name in table.grows:
                rows["norm", name], rows["fell", name] = norms_and_falls(value, broadcast.get(name))
            else:
                rows["norm", name] = change_norms(value, broadcast.get(name), rough=True)
        for own in (VARIANCE, COUNT):
            low = [
                as_rows(each < (buffers.get(name, 0) if own == COUNT else 0))
                for name, each in replies.buffers.items()
                if name_in_layer(name) == own
            ]
            if low:
                rows["fell", own] = torch.cat(low, 1).any(1)
        host = _on_the_host(rows, replies.spread)
        reasons: dict[int, str] = {}
        for name, value in values.items():
            for row in _not_finite(host["norm", name], value, replies.spread):
                reasons.setdefault(row, f"{name} is not finite")
        for name in (name for what, name in host if what == "fell"):
            below = "is below zero" if name == VARIANCE else f"fell below the broadcast {name}"
            for row in _where(host["fell", name]):
                reasons.setdefault(row, f"{name} {below}")
        return cls(reasons, {name: host["norm", name] for name in values if name not in kept})


def clip_factors(
    norms: Mapping[str, Sequence[float]], max_norm_ratio: float | None, broadcast: Slots
) -> dict[str, list[float]]:
    """The factor for each reply's change, for slots and buffers in which any is shortened."""
    if max_norm_ratio is None:
        return {}
    found = {
        name: shortening(each, max_norm_ratio, None if name.startswith(BUFFER) else broadcast.get(name, broadcast.x))
        for name, each in norms.items()
    }
    return {name: factors for name, factors in found.items() if min(factors, default=1.0) < 1}


def clip_buffers(stacked: Buffers, broadcast: Mapping[str, Tensor], factors: Mapping[str, Sequence[float]]) -> Buffers:
    """Buffers `[R, …]` with long changes shortened."""
    return {name: clip(each, broadcast.get(name), factors.get(BUFFER + name, ())) for name, each in stacked.items()}


def clipped_clients(clients: Tensor, factors: Mapping[str, Sequence[float]]) -> tuple[int, ...]:
    """The clients with a shortened change."""
    rows = {row for each in factors.values() for row in _where(factor < 1 for factor in each)}
    return tuple(int(clients[row]) for row in sorted(rows))


def _on_the_host(rows: Mapping[Key, Tensor], spread: Spread) -> dict[Key, list[float]]:
    """Measured rows as lists, fetched together from a GPU or other ranks."""
    if not rows:
        return {}
    every = spread.gather(torch.stack([row.double() for row in rows.values()], dim=1))
    return dict(zip(rows, every.t().tolist(), strict=True))


def _not_finite(norms: Sequence[float], values: Tensor, spread: Spread) -> Iterable[int]:
    """The rows with numbers that are not finite. A finite norm proves that there are none; any other may be an
    overflow, so look closer."""
    if all(map(math.isfinite, norms)):
        return ()
    held = zip(norms[spread.held], values, strict=True)
    mine = [not (math.isfinite(norm) or bool(torch.isfinite(row).all())) for norm, row in held]
    return _where(spread.gather(torch.tensor(mine, device=values.device, dtype=torch.uint8)).tolist())


def name_in_layer(buffer: str) -> str:
    """The name that a buffer has in its own layer."""
    return buffer.rpartition(".")[2]


def buffer_changes(stacked: Buffers, broadcast: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The change of every buffer except integers, `[R, …]`.

    A buffer may be infinite and stay so, such as a mask, or a running minimum before its first number.
    """
    floats = {name: real for name, each in stacked.items() if (real := real_numbers(each)).is_floating_point()}
    if not floats:
        return {}
    values = torch.cat([as_rows(each) for each in floats.values()], 1)
    before = [broadcast.get(name, each.new_zeros(each.shape[1:])) for name, each in floats.items()]
    known = torch.cat([real_numbers(each).flatten() for each in before])
    change = values - torch.nan_to_num(known, nan=0.0, posinf=0.0, neginf=0.0)
    change.masked_fill_(values == known, 0.0)
    parts = torch.split(change, [each.shape[1:].numel() for each in floats.values()], 1)
    return {BUFFER + name: part for name, part in zip(floats, parts, strict=True)}


def _where(flags: Iterable[float]) -> Iterator[int]:
    return (row for row, flag in enumerate(flags) if flag)
