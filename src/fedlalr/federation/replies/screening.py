"""Which replies may be reduced. One place for the simulator and for deployments.

`screen` looks at a whole cohort's replies, stacked; `screen_reply` at one reply as it came in from a remote client, and
turns it into a stack of one. Both apply the same rules to the numbers. A reply is refused as a whole, with its client
and the reason, and the server's state never sees it. Where nobody is to be refused, a `glance` mostly says so.

The bound on a slot's change is relative to the cohort: a multiple of the median, over the replies, of the norm of the
change from the broadcast. It is never taken per coordinate, where honest clients differ by orders of magnitude. A slot
that can only grow (v̂) may stand still for most of the cohort, so its own broadcast norm counts as a scale too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.replies.glance import plainly_sound
from fedlalr.federation.replies.payload import Expected, Refused, Reply, client_of, unpack
from fedlalr.federation.replies.reducing import small_changes
from fedlalr.federation.replies.reductions import change_norms, norms_and_falls
from fedlalr.training.interfaces import Buffers, Replies, real_numbers
from fedlalr.training.ranks import Spread

MAX_NORM_RATIO = 1000.0
"""A reply whose change is longer than this many times the cohort's median is refused, where the user says nothing."""

VARIANCE, COUNT = "running_var", "num_batches_tracked"
"""What torch's normalisation layers call the variance that they remember, which no average of batches brings below
zero, and the number of those batches, which can only grow."""


Key = tuple[str, str]
"""What is measured, and of which slot."""


LONGEST_REASON = 1000
"""Characters of an error that are recorded: what a client raises may be endless."""


class Rejection(NamedTuple):
    """A client whose reply was left out, and why."""

    client: int
    reason: str

    @classmethod
    def because(cls, client: int, reason: object) -> Rejection:
        """For a reason in somebody else's words, made fit to be recorded: of bounded length, and valid Unicode."""
        text = str(reason)
        text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"
        return cls(client, text.encode(errors="backslashreplace").decode())


def screen(
    replies: Replies,
    broadcast: Slots,
    table: SlotTable,
    *,
    buffers: Mapping[str, Tensor] | None = None,
    max_norm_ratio: float | None = MAX_NORM_RATIO,
    changes: Mapping[str, Tensor] | None = None,
) -> tuple[Replies, tuple[Rejection, ...]]:
    """The replies that may be reduced, and the refused ones with their reasons, both in client order.

    `changes` are what `small_changes` says, for those who need them, too.
    """
    rejected = [Rejection.because(client, reason) for client, reason in replies.failures.items()]
    changes = small_changes(replies, broadcast) if changes is None else changes
    if not len(replies.clients) or plainly_sound(replies, broadcast, table, max_norm_ratio, changes):
        return replies, tuple(sorted(rejected))
    measured = Measured.of(replies, broadcast, table, buffers or {})
    reasons = measured.reasons(max_norm_ratio)
    rejected += [Rejection(int(replies.clients[row]), reason) for row, reason in reasons.items()]
    if not reasons:
        return replies, tuple(sorted(rejected))
    good = torch.tensor(
        [row for row in range(len(replies.clients)) if row not in reasons], dtype=torch.int64, device="cpu"
    )
    return replies.rows(good), tuple(sorted(rejected))


def screen_reply(reply: Reply, expected: Expected) -> Replies | Rejection:
    """One remote reply as a stack of one, or why it is refused. The bound relative to the cohort waits for `screen`."""
    outcome = measure_reply(reply, expected)
    return outcome if isinstance(outcome, Rejection) else outcome[0]


def measure_reply(reply: Reply, expected: Expected) -> tuple[Replies, Measured] | Rejection:
    """The same with what was measured of it, for those who apply the bound later."""
    try:
        replies = unpack(reply, expected)
    except Refused as refusal:
        return Rejection(client_of(reply), str(refusal))
    measured = Measured.of(replies, expected.broadcast, expected.table, expected.buffers)
    reasons = measured.reasons(None)
    return Rejection(client_of(reply), reasons[0]) if reasons else (replies, measured)


class Measured(NamedTuple):
    """What the rules need to know of a stack of replies, on the host: a list has one entry for each reply."""

    finite: dict[str, list[bool]]
    """Whether every number is finite, of each slot, of the buffers together and of each kept slot."""
    fell: dict[str, list[bool]]
    """Whether a slot or count that can only grow is below its broadcast anywhere, or a variance below zero."""
    norms: dict[str, list[float]]
    """Norm of the change of each slot and of the buffers together."""
    scales: dict[str, float]
    """Norm of the broadcast of the slots that grow."""

    @classmethod
    def of(cls, replies: Replies, broadcast: Slots, table: SlotTable, buffers: Mapping[str, Tensor]) -> Measured:
        """Measure on the device; unless something is not finite, one copy to the host is the only synchronisation."""
        spread, count = replies.spread, len(replies.spread.mine(replies.clients))
        values = dict(replies.slots.items()) | {f"kept {name}": kept for name, kept in replies.kept.items()}
        floats = _float_buffers(replies.buffers, buffers)
        if floats is not None:
            values["buffers"] = floats
        rows: dict[Key, Tensor] = {}
        for name, value in values.items():
            if name in table.grows:
                rows["norm", name], rows["fell", name] = norms_and_falls(value, broadcast[name])
                rows["scale", name] = change_norms(broadcast[name][None]).expand(count)
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
            norms={name: norm for name, norm in norms.items() if not name.startswith("kept ")},
            scales={name: scales[0] for (what, name), scales in host.items() if what == "scale"},
        )

    def reasons(self, max_norm_ratio: float | None) -> dict[int, str]:
        """Why a reply is refused, for each row that is."""
        found: dict[int, str] = {}
        for name, finite in self.finite.items():
            for row in _where(not one for one in finite):
                found.setdefault(row, f"{name} {'are' if name == 'buffers' else 'is'} not finite")
        usable = [all(flags) for flags in zip(*self.finite.values(), strict=True)]
        for name, fell in self.fell.items():
            for row in _where(fell):
                below = "is below zero" if name == VARIANCE else f"fell below the broadcast {name}"
                found.setdefault(row, f"{name} {below}")
        if max_norm_ratio is None or not any(usable):
            return found
        for name, norms in self.norms.items():
            scale = max(median_low(compress(norms, usable)), self.scales.get(name, 0.0))
            if scale == 0:
                continue  # a cohort that did not move gives nothing to compare with
            for row in _where(norm > max_norm_ratio * scale for norm in norms):
                found.setdefault(
                    row,
                    f"the change of {name} has norm {norms[row]:.3g}, more than {max_norm_ratio:g} times "
                    f"the cohort's {scale:.3g}",
                )
        return found


def _on_the_host(rows: Mapping[Key, Tensor], spread: Spread) -> dict[Key, list[float]]:
    """Measured rows as lists, fetched together from a GPU or other ranks."""
    if spread.is_whole and all(row.device.type == "cpu" for row in rows.values()):
        return {key: row.tolist() for key, row in rows.items()}
    every = spread.gather(torch.stack([row.double() for row in rows.values()], dim=1))
    return dict(zip(rows, every.t().tolist(), strict=True))


def _finite(norms: Sequence[float], values: Tensor, spread: Spread) -> list[bool]:
    """Which rows hold finite numbers alone. A finite norm proves it; another may be an overflow and is looked into."""
    finite = [math.isfinite(norm) for norm in norms]
    if not all(finite):
        mine = finite[spread.held]
        suspects = list(_where(not one for one in mine))
        for row, good in zip(suspects, torch.isfinite(values[suspects]).all(1).tolist(), strict=True):
            mine[row] = good
        every = spread.gather(torch.tensor(mine, device=values.device, dtype=torch.uint8))
        finite = [flag > 0 for flag in every.tolist()]
    return finite


def _float_buffers(stacked: Buffers, broadcast: Mapping[str, Tensor]) -> Tensor | None:
    """The change of all buffers but whole numbers, of every reply side by side, `[R, …]`.

    One may be infinite from the start and stay so: a mask for ever, a running minimum before its first number.
    """
    real = {name: real_numbers(values) for name, values in stacked.items()}
    floats = {name: values for name, values in real.items() if values.is_floating_point()}
    if not floats:
        return None
    values = torch.cat([_rows(each) for each in floats.values()], 1)
    before = {name: real_numbers(broadcast[name]) for name in floats if name in broadcast}
    known = torch.cat([before.get(name, each.new_zeros(each.shape[1:])).flatten() for name, each in floats.items()])
    if known.is_cpu and math.isfinite(known.sum().item()):  # a GPU is not waited for
        return values - known
    change = values - torch.nan_to_num(known, nan=0.0, posinf=0.0, neginf=0.0)
    return change.masked_fill_(values == known, 0.0)


def _own_name(buffer: str) -> str:
    """What its layer calls a buffer."""
    return buffer.rpartition(".")[2]


def _rows(values: Tensor) -> Tensor:
    """One row for each reply, of one number too."""
    return values.flatten(1) if values.dim() > 1 else values[:, None]


def _where(flags: Iterable[bool]) -> Iterator[int]:
    return (row for row, flag in enumerate(flags) if flag)
