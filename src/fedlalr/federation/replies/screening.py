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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.common.printable import printable
from fedlalr.federation.replies.payload import Expected, Rejected, Reply, client_of, unpack
from fedlalr.federation.replies.reductions import SHARE, change_norms, clip, norms_and_falls
from fedlalr.training.interfaces import Buffers, Replies, real_numbers
from fedlalr.training.personal import BUFFER as LOCAL
from fedlalr.training.ranks import Spread

MAX_NORM_RATIO = 10.0
"""Honest clients of equal size changed x and m by less than this (7.1 times the scale in 30 rounds of every method on
the quickstart; v̂ not always), and one hostile client of fifty moves a mean by at most a fifth of an ordinary change."""

SEVERAL = 3
"""A client that is rejected in this many of its rounds in a row is reported."""

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
    measured = Measured.of(replies, broadcast, table, buffers)
    reasons = measured.reasons()
    ids: list[int] = replies.clients.tolist()
    rejected = tuple(sorted([*failures, *(Rejection(ids[row], reason) for row, reason in reasons.items())]))
    factors = measured.factors(max_norm_ratio, broadcast, reasons)
    good = [row for row in range(len(ids)) if row not in reasons]
    if reasons:
        replies = replies.rows(torch.tensor(good, dtype=torch.int64, device="cpu"))
        factors = {name: [each[row] for row in good] for name, each in factors.items()}
    if factors:
        replies = _clipped(replies, factors, broadcast, buffers)
    return Screened(replies, rejected, clipped_clients(replies.clients, factors))


def measure_reply(reply: Reply, expected: Expected) -> tuple[Replies, Measured] | Rejection:
    """One remote reply as a stack of one with its measurements, or why it is rejected. Clipping needs the cohort."""
    try:
        replies = unpack(reply, expected)
    except Rejected as reason:
        return Rejection(client_of(reply), str(reason))
    measured = Measured.of(replies, expected.broadcast, expected.table, expected.buffers)
    reasons = measured.reasons()
    return Rejection(client_of(reply), reasons[0]) if reasons else (replies, measured)


class Measured(NamedTuple):
    """What the rules need to know about a stack of replies, on the host: lists with one entry per reply."""

    finite: dict[str, list[bool]]
    """Whether every number of a slot, float buffer or kept slot is finite."""
    fell: dict[str, list[bool]]
    """Whether a slot or count that can only grow is below its broadcast anywhere, or a variance below zero."""
    norms: dict[str, list[float]]
    """Norm of the change of each slot and float buffer."""

    @classmethod
    def of(cls, replies: Replies, broadcast: Slots, table: SlotTable, buffers: Mapping[str, Tensor]) -> Measured:
        """Measure on the device. If everything is finite, a single copy to the host is the only synchronisation."""
        spread = replies.spread
        # local buffers stay with their client and harm nobody else
        kept = {f"kept {name}": each for name, each in replies.kept.items() if not name.startswith(LOCAL)}
        values = dict(replies.slots.items()) | buffer_changes(replies.buffers, buffers) | kept
        rows: dict[Key, Tensor] = {}
        for name, value in values.items():
            if name in table.grows:
                rows["norm", name], rows["fell", name] = norms_and_falls(value, broadcast.get(name))
            else:
                rows["norm", name] = change_norms(value, broadcast.get(name), rough=True)
        variances = [_rows(values) for name, values in replies.buffers.items() if _own_name(name) == VARIANCE]
        if variances:
            rows["fell", VARIANCE] = torch.cat(variances, 1).amin(1) < 0
        known = replies.buffers.keys() & buffers.keys()
        counts = [_rows(replies.buffers[name] < buffers[name]) for name in sorted(known) if _own_name(name) == COUNT]
        if counts:
            rows["fell", COUNT] = torch.cat(counts, 1).any(1)
        host = _on_the_host(rows, spread)
        norms = {name: host["norm", name] for name in values}
        return cls(
            finite={name: _finite(norms[name], value, spread) for name, value in values.items()},
            fell={name: [flag > 0 for flag in flags] for (what, name), flags in host.items() if what == "fell"},
            norms={name: norm for name, norm in norms.items() if name not in kept},
        )

    def reasons(self) -> dict[int, str]:
        """Row → reason, for each rejected reply."""
        found: dict[int, str] = {}
        for name, finite in self.finite.items():
            for row in _where(not one for one in finite):
                found.setdefault(row, f"{name} is not finite")
        for name, fell in self.fell.items():
            for row in _where(fell):
                below = "is below zero" if name == VARIANCE else f"fell below the broadcast {name}"
                found.setdefault(row, f"{name} {below}")
        return found

    def factors(
        self, max_norm_ratio: float | None, broadcast: Slots, rejected: Collection[int] = ()
    ) -> dict[str, list[float]]:
        """The factor for each row's change, for slots and buffers in which any is shortened."""
        found: dict[str, list[float]] = {}
        if max_norm_ratio is None:
            return found
        for name, norms in self.norms.items():
            usable = [norm for row, norm in enumerate(norms) if row not in rejected] if rejected else norms
            scale = median_low(usable) if usable else math.inf
            if max(usable, default=0.0) > max_norm_ratio * scale:  # rare, so the broadcast is measured only then
                bound = max_norm_ratio * max(scale, floor_of(name, broadcast))
                found[name] = [bound / norm if norm > bound else 1.0 for norm in norms]
        return {name: each for name, each in found.items() if min(each) < 1}


def floor_of(name: str, broadcast: Slots) -> float:
    """The smallest scale of a slot or buffer."""
    if name.startswith(BUFFER):
        return 0.0
    return SHARE * float(change_norms(broadcast.get(name, broadcast.x)[None]))


def clipped_clients(clients: Tensor, factors: Mapping[str, Sequence[float]]) -> tuple[int, ...]:
    """The clients with a shortened change."""
    rows = {row for each in factors.values() for row in _where(factor < 1 for factor in each)}
    return tuple(int(clients[row]) for row in sorted(rows))


def clip_buffers(stacked: Buffers, broadcast: Mapping[str, Tensor], factors: Mapping[str, Sequence[float]]) -> Buffers:
    """Buffers `[R, …]` with long changes shortened."""
    return {
        name: clip(values, broadcast.get(name), factors[BUFFER + name]) if BUFFER + name in factors else values
        for name, values in stacked.items()
    }


def _clipped(
    replies: Replies, factors: Mapping[str, list[float]], broadcast: Slots, buffers: Mapping[str, Tensor]
) -> Replies:
    mine = {name: each[replies.spread.held] for name, each in factors.items()}
    slots = {
        name: clip(values, broadcast.get(name), mine[name]) if name in mine else values
        for name, values in replies.slots.items()
    }
    return replace(replies, slots=Slots(**slots), buffers=clip_buffers(replies.buffers, buffers, mine))


def _on_the_host(rows: Mapping[Key, Tensor], spread: Spread) -> dict[Key, list[float]]:
    """Measured rows as lists, fetched together from a GPU or other ranks."""
    if spread.is_whole and all(row.device.type == "cpu" for row in rows.values()):
        return {key: row.tolist() for key, row in rows.items()}
    every = spread.gather(torch.stack([row.double() for row in rows.values()], dim=1))
    return dict(zip(rows, every.t().tolist(), strict=True))


def _finite(norms: Sequence[float], values: Tensor, spread: Spread) -> list[bool]:
    """Which rows hold only finite numbers. A finite norm proves it; any other may be an overflow, so look closer."""
    finite = [math.isfinite(norm) for norm in norms]
    if not all(finite):
        mine = finite[spread.held]
        suspects = list(_where(not one for one in mine))
        for row, good in zip(suspects, torch.isfinite(values[suspects]).all(1).tolist(), strict=True):
            mine[row] = good
        every = spread.gather(torch.tensor(mine, device=values.device, dtype=torch.uint8))
        finite = [flag > 0 for flag in every.tolist()]
    return finite


def buffer_changes(stacked: Buffers, broadcast: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The change of every buffer except integers, `[R, …]`.

    A buffer may be infinite and stay so, such as a mask, or a running minimum before its first number.
    """
    real = {name: real_numbers(values) for name, values in stacked.items()}
    floats = {name: values for name, values in real.items() if values.is_floating_point()}
    if not floats:
        return {}
    values = torch.cat([_rows(each) for each in floats.values()], 1)
    before = {name: real_numbers(broadcast[name]) for name in floats if name in broadcast}
    known = torch.cat([before.get(name, each.new_zeros(each.shape[1:])).flatten() for name, each in floats.items()])
    if known.is_cpu and math.isfinite(known.sum().item()):  # on a GPU this would synchronise
        change = values - known
    else:
        change = values - torch.nan_to_num(known, nan=0.0, posinf=0.0, neginf=0.0)
        change.masked_fill_(values == known, 0.0)
    parts = torch.split(change, [each.shape[1:].numel() for each in floats.values()], 1)
    return {BUFFER + name: part for name, part in zip(floats, parts, strict=True)}


def _own_name(buffer: str) -> str:
    """A buffer's name within its layer."""
    return buffer.rpartition(".")[2]


def _rows(values: Tensor) -> Tensor:
    """One row for each reply, also for scalars."""
    return values.flatten(1) if values.dim() > 1 else values[:, None]


def _where(flags: Iterable[bool]) -> Iterator[int]:
    return (row for row, flag in enumerate(flags) if flag)
