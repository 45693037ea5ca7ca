"""Parts that all figures of curves share: what is enlarged where curves overlap, and which curve is cheapest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ZOOM = 0.6
"""The part of the rounds, or passes, before the enlarged ones."""
CLOSE = 0.12
"""Curves that end at most this far below the best are enlarged."""


class Line(NamedTuple):
    """A drawn curve."""

    x: NDArray[Any]
    y: Array
    """Means over the seeds; NaN where one has no value."""
    look: Mapping[str, Any]


class Region(NamedTuple):
    """A part of a panel, and the lines in it."""

    lines: Sequence[Line]
    y: tuple[float, float]
    x: tuple[float, float] | None = None
    """None: as far as the lines go."""


def ends(lines: Sequence[Line]) -> Region | None:
    """The last part of the accuracies that end highest; None if fewer than two end close together."""
    last = [float(np.nan_to_num(line.y[-1])) for line in lines]
    close = [line for line, end in zip(lines, last, strict=True) if end >= max(last) - CLOSE]
    if len(close) < 2:
        return None
    shown, values = _last_part(close)
    return Region(shown, (float(np.quantile(values, 0.02)) - 0.01, float(values.max()) + 0.005))


def loss_ends(lines: Sequence[Line]) -> Region | None:
    """The last part of the losses that end lowest, without those that diverge; None if fewer than two are left."""
    last = [float(np.nan_to_num(line.y[-1], nan=np.inf)) for line in lines]
    close = [line for line, end in zip(lines, last, strict=True) if end <= 2 * min(last)]
    if len(close) < 2:
        return None
    shown, values = _last_part(close)
    return Region(shown, (float(values.min()) - 0.01, float(np.quantile(values, 0.98)) + 0.01))


def rise(lines: Sequence[Line], costs: Sequence[float], target: float) -> Region | None:
    """Where accuracies rise to a target, against what they cost; None if fewer than two reach it.

    `costs` are those of reaching it, infinite for a line that does not.
    """
    reached = [cost for cost in costs if np.isfinite(cost)]
    if len(reached) < 2:
        return None
    first, last = 0.5 * min(reached), 1.3 * max(reached)
    values = np.concatenate([line.y[(line.x >= first) & (line.x <= last)] for line in lines])
    return Region(lines, (0.8 * target, max(1.02 * target, float(np.nanmax(values)) + 0.01)), (first, last))


def draw_enlarged(axes: Any, region: Region, linewidth: float) -> None:
    for line in region.lines:
        axes.plot(line.x, line.y, **{**line.look, "linewidth": linewidth})
    axes.set_ylim(*region.y)
    if region.x is not None:
        axes.set_xlim(*region.x)


def mean_cost(costs: Sequence[float | None]) -> float:
    """The mean cost of reaching a target over the seeds; infinite if one of them does not reach it.

    >>> mean_cost([2.0, 4.0]), mean_cost([2.0, None]), mean_cost([])
    (3.0, inf, inf)
    """
    known = [cost for cost in costs if cost is not None]
    return float(np.mean(known)) if known and len(known) == len(costs) else np.inf


def percent(value: float, _: object = None) -> str:
    """
    >>> percent(0.825), percent(0.9)
    ('82.5 %', '90 %')
    """
    return f"{100 * value:.4g} %"


def _last_part(lines: Sequence[Line]) -> tuple[list[Line], Array]:
    """The lines without their first part, and all values that are left."""
    first = ZOOM * min(line.x[-1] for line in lines)
    shown = [Line(line.x[line.x > first], line.y[line.x > first], line.look) for line in lines]
    values = np.concatenate([line.y for line in shown])
    return shown, values[~np.isnan(values)]
