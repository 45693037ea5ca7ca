"""Reductions of one slot over the cohort: the mean, and robust ones that hostile replies can hardly move.

Each works on the *change* from the broadcast (from zero, if the slot was not broadcast). So a coordinate that no client
changed stays exactly as it was, and v̂, whose changes are never negative, never falls below its broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Annotated, Any, Protocol, cast

import torch
from torch import Tensor

from fedlalr.algorithms.slots import SlotTable
from fedlalr.common.named import built, check_names
from fedlalr.common.option_types import Bounds, Checked, Positive
from fedlalr.training.interfaces import real_numbers
from fedlalr.training.kernels import cohort

SHARE = 0.02
"""The part of a slot's broadcast norm that counts as an ordinary change if most clients change less. With a ratio of
ten, a client with data that the others lack may change a fifth of the slot in a round, and so has an effect at once.
With ten times this share, one hostile client of fifty could undo what has been learned."""
BUFFERS = "buffers"
"""The name of the module's buffers in `reduce`."""
COORDINATES_AT_A_TIME = 1 << 22
"""Numbers that are sorted at once, which bounds the memory of a sort."""
NUMBERS_IN_CACHE = 1 << 18
"""Numbers that are processed at once if memory bandwidth is the bottleneck. The sum of so many squares in float32 has
three correct digits even if all roundings go the same way."""
ALIGNED = 1024
"""Coordinates that are summed together."""
SAFE_NORMS = (1e-12, 1e15)
"""A float32 norm between these has lost nothing to squares that underflow or overflow."""


class SlotReduction(Protocol):
    """Reduces the uploads `[R, P]` of a slot to one value `[P]`."""

    def reduce(self, values: Tensor, reference: Tensor | None, share: Tensor) -> Tensor:
        """The reduced slot, from the uploads, the broadcast if there is one, and the weights `[R]`."""


@dataclass(frozen=True)
class Mean:
    """The weighted mean."""

    def reduce(self, values: Tensor, reference: Tensor | None, share: Tensor) -> Tensor:
        return mean_change(values, reference, share)


@dataclass(frozen=True)
class Max:
    """The largest value of each coordinate. A single client can raise it: combine it with a bound."""

    def reduce(self, values: Tensor, reference: Tensor | None, share: Tensor) -> Tensor:
        return values.amax(0)


@dataclass(frozen=True)
class Median:
    """The median of each coordinate (the mean of the middle two, if their number is even). Weights are ignored.

    >>> Median().reduce(torch.tensor([[1.0], [2.0], [900.0]]), torch.tensor([0.0]), torch.ones(3) / 3)
    tensor([2.])
    """

    def reduce(self, values: Tensor, reference: Tensor | None, share: Tensor) -> Tensor:
        return _by_coordinate(values, reference, _middle)


@dataclass(frozen=True)
class Trimmed(Checked):
    """The mean of each coordinate without the lowest and the highest `share` of the replies. Weights are ignored.

    If there are at least three replies, at least one is left out at either end.
    """

    called = "the {field} that {owner} leaves out at either end"
    share: Annotated[float, Bounds(gt=0, lt=0.5), "lie in (0, 0.5)"] = 0.2

    def reduce(self, values: Tensor, reference: Tensor | None, share: Tensor) -> Tensor:
        count = len(values)
        out = min(math.ceil(self.share * count - 1e-9), (count - 1) // 2)  # 0.07 * 100 is slightly more than 7
        return _by_coordinate(values, reference, lambda ordered: ordered[out : count - out].mean(0))


@dataclass(frozen=True)
class Bounded(Checked):
    """The weighted mean of changes, each clipped to at most `ratio` times the slot's scale.

    The scale is the cohort's median norm of the change, or `SHARE` of the broadcast's norm if that is more.
    """

    called = "the {field} of {owner}"
    ratio: Positive = 1.0

    def reduce(self, values: Tensor, reference: Tensor | None, share: Tensor) -> Tensor:
        change = values if reference is None else values - reference
        factors = shortening(change_norms(change).tolist(), self.ratio, reference)
        mean = (change * (values.new_tensor(factors) * share)[:, None]).sum(0)
        return mean if reference is None else reference + mean


REDUCTIONS: dict[str, Callable[..., SlotReduction]] = {
    kind.__name__.lower(): kind for kind in (Mean, Max, Median, Trimmed, Bounded)
}
"""Reductions by name."""


def as_reductions(given: Mapping[str, Any] | None, table: SlotTable) -> dict[str, SlotReduction]:
    """The reductions a user chose, by slot: names, dicts such as `{"name": "trimmed", "share": 0.1}`, or objects.

    Buffers belong to the model, so they are reduced like the first slot (x or its change) unless given.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"reduce must be a dict from slot to reduction, such as {{'x': 'median'}}, not {given!r}")
    check_names("reduce names the slot", given, "the clients send", [*table.up, BUFFERS])
    chosen = {slot: _as_reduction(slot, how) for slot, how in given.items()}
    first = next(iter(table.up), None)
    return {BUFFERS: chosen[first], **chosen} if first in chosen else chosen


def mean_change(values: Tensor, reference: Tensor | None, share: Tensor) -> Tensor:
    """The weighted mean of rows `[R, P]`, computed as a change from the reference if there is one."""
    if cohort.fits(values, reference):
        return cohort.mean_change(values, values.new_zeros(values.shape[1]) if reference is None else reference, share)
    if values.device.type == "cpu":
        return _mean_in_the_cache(values, reference, share)
    if reference is None:
        return (values * share[:, None]).sum(0)
    return reference + ((values - reference) * share[:, None]).sum(0)


def _mean_in_the_cache(values: Tensor, reference: Tensor | None, share: Tensor) -> Tensor:
    """The same, a few coordinates at a time, so that the changes stay in the processor's cache."""
    count, size = values.shape
    out, column = values.new_empty(size), share[:, None]
    for start, stop in pieces(size, NUMBERS_IN_CACHE // max(count, 1)):
        part = values[:, start:stop]
        if reference is None:
            torch.sum(part * column, 0, out=out[start:stop])
        else:
            base = reference[start:stop]
            torch.add(base, (part - base).mul_(column).sum(0), out=out[start:stop])
    return out


def pieces(size: int, width: int) -> list[tuple[int, int]]:
    """Slices of about `width` coordinates whose sums over a cohort have the same bits as those of the whole.

    torch sums columns in groups, and the last bits depend on the grouping. So slices start at multiples of `ALIGNED`
    and are at least that long, unless there are fewer coordinates.

    >>> pieces(5000, 2000)
    [(0, 1024), (1024, 2048), (2048, 3072), (3072, 5000)]
    """
    width = max(ALIGNED, width // ALIGNED * ALIGNED)
    starts = [0, *range(width, size - ALIGNED, width)]  # a short remainder is part of the last slice
    return list(zip(starts, [*starts[1:], size], strict=True))


def change_norms(values: Tensor, reference: Tensor | None = None, *, rough: bool = False) -> Tensor:
    """The Euclidean norm of each row's change, in float64: a float32 sum of squares of v̂ would underflow.

    Rough norms are correct to three digits and take a third of the time on a CPU.
    """
    if reference is not None and cohort.fits(values, reference):
        return cohort.changes(values, reference)[0]
    norm = _rough_norm if rough else _norm
    return torch.cat([_joined([norm(part) for part in parts]) for parts in _changes(values, reference)])


def norms_and_falls(values: Tensor, reference: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rough `change_norms`, and which rows are below the reference anywhere, bool `[R]`, in one pass."""
    if reference is not None and cohort.fits(values, reference):
        return cohort.changes(values, reference)
    norms, fell = [], []
    for parts in _changes(values, reference):
        measured = [(_rough_norm(part), part.amin(1)) for part in parts]
        norms.append(_joined([norm for norm, _ in measured]))
        fell.append(torch.stack([least for _, least in measured]).amin(0) < 0)
    return torch.cat(norms), torch.cat(fell)


def shortening(norms: Sequence[float], ratio: float, reference: Tensor | None) -> list[float]:
    """The factor for each change, so that none is longer than `ratio` times the scale.

    The scale is the median norm, or `SHARE` of the reference's norm if there is one and that is more.

    >>> shortening([1.0, 2.0, 40.0], 10.0, None)
    [1.0, 1.0, 0.5]
    """
    scale = median_low(norms) if norms else math.inf
    if reference is not None and max(norms, default=0.0) > ratio * scale:  # rare: only then is it measured
        scale = max(scale, SHARE * float(change_norms(reference[None])))
    bound = ratio * scale
    return [bound / norm if norm > bound else 1.0 for norm in norms]


def as_rows(values: Tensor) -> Tensor:
    """One row `[…]` for each reply, also for scalars."""
    return values[..., None].flatten(1)


def clip(values: Tensor, reference: Tensor | None, factors: Sequence[float]) -> Tensor:
    """The rows with their changes multiplied by `factors`; a row whose factor is 1 keeps its bits.

    Numbers equal to the reference are kept, such as the infinite ones of a mask. If the reference is infinite and a row
    is not, the change is measured from zero.
    """
    rows = [row for row, factor in enumerate(factors) if factor < 1]
    if not rows:
        return values
    if values.is_complex():
        before = None if reference is None else real_numbers(reference)
        return torch.view_as_complex(clip(real_numbers(values), before, factors))
    part = values[rows].double()
    before = torch.zeros_like(part[0]) if reference is None else reference.double()
    start = torch.nan_to_num(before, nan=0.0, posinf=0.0, neginf=0.0)
    factor = torch.tensor([factors[row] for row in rows], dtype=torch.float64, device=values.device)
    shorter = start + factor.view(-1, *[1] * start.dim()) * (part - start)
    clipped = values.clone()
    clipped[rows] = torch.where(part == before, part, shorter).to(values.dtype)
    return clipped


def _changes(values: Tensor, reference: Tensor | None) -> Iterator[Iterator[Tensor]]:
    """The changes of some rows, in pieces `[rows, …]`; on a CPU so small that a piece stays in its cache."""
    at_once = NUMBERS_IN_CACHE if values.device.type == "cpu" else max(values.numel(), 1)
    for some in torch.split(values, max(at_once // max(values.shape[1], 1), 1)):
        parts = torch.split(some, at_once, 1)
        if reference is None:
            yield iter(parts)
        else:
            yield (part - base for part, base in zip(parts, torch.split(reference, at_once), strict=True))


def _joined(norms: list[Tensor]) -> Tensor:
    """The norms of rows, from those of their pieces."""
    return norms[0].double() if len(norms) == 1 else _norm(torch.stack(norms, 1))


def _rough_norm(change: Tensor) -> Tensor:
    """The norm in the numbers' own precision if it has three correct digits there, without underflow or overflow."""
    if change.dtype == torch.float32 and change.device.type == "cpu":
        norms: Tensor = torch.linalg.vector_norm(change, dim=1)
        if all(SAFE_NORMS[0] < norm < SAFE_NORMS[1] for norm in norms.tolist()):
            return norms
    return _norm(change)


def _norm(change: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(change, dim=1, dtype=torch.float64)
    return norms


def _by_coordinate(values: Tensor, reference: Tensor | None, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Sort every coordinate over the cohort and reduce the sorted changes, a few coordinates at a time."""
    width = max(1, COORDINATES_AT_A_TIME // len(values))
    parts = []
    for start in range(0, values.shape[1], width):
        part = values[:, start : start + width]
        if reference is None:
            parts.append(reduce(part.sort(0).values))
        else:
            base = reference[start : start + width]
            parts.append(base + reduce((part - base).sort(0).values))
    return torch.cat(parts)


def _middle(ordered: Tensor) -> Tensor:
    count = len(ordered)
    low, high = ordered[(count - 1) // 2], ordered[count // 2]
    return low + (high - low) / 2


def _as_reduction(slot: str, how: object) -> SlotReduction:
    how = built(how, REDUCTIONS, f"{slot} cannot be reduced by", f"the reduction {{!r}} of {slot}")
    if isinstance(how, type) or not hasattr(how, "reduce"):
        raise TypeError(
            f"the reduction of {slot} must be one of {', '.join(map(repr, REDUCTIONS))}, or an object such as "
            f"fl.reductions.Trimmed(0.2), not {how!r}"
        )
    return cast(SlotReduction, how)
