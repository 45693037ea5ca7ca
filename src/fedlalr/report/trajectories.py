"""Measurements over the local steps of selected clients, as lines to draw."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fedlalr.federation.trajectory import TrajectoryPoint
from fedlalr.report.groups import plain
from fedlalr.report.runs import ReportedRun

_QUANTILE = re.compile(r"(.+), ([0-9.]+) %")


class Quantity(NamedTuple):
    """A quantity to draw: a value, or quantiles as a line with a band."""

    name: str
    detail: str
    """The meaning of a line and its band."""
    middle: str
    low: str | None = None
    high: str | None = None


def trajectories_of(run: ReportedRun, label: str) -> dict[str, Any] | None:
    """The recorded rounds in sequence: a line for each client and quantity, and the start of each round."""
    if not run.trajectory:
        return None
    places, marks = _places(run.trajectory)
    quantities = _quantities(dict.fromkeys(name for point in run.trajectory for name in point.values))
    by_client: dict[int, list[TrajectoryPoint]] = {}
    for point in run.trajectory:
        by_client.setdefault(point.client, []).append(point)
    return {
        "label": label,
        "marks": [{"x": x, "round": round} for round, x in marks.items()],
        "quantities": [{"name": one.name, "detail": one.detail} for one in quantities],
        "clients": [_lines(by_client[client], quantities, places) for client in sorted(by_client)],
    }


def _places(points: Sequence[TrajectoryPoint]) -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """The position of each (round, step) on an axis with the recorded rounds in sequence, and of each round's start.

    >>> _places([TrajectoryPoint(1, 0, 1, {}), TrajectoryPoint(1, 0, 2, {}), TrajectoryPoint(31, 0, 1, {})])
    ({(1, 1): 1, (1, 2): 2, (31, 1): 3}, {1: 1, 31: 3})
    """
    steps = sorted({(point.round, point.step) for point in points})
    places = {step: i for i, step in enumerate(steps, start=1)}
    starts: dict[int, int] = {}
    for (round, _), place in places.items():
        starts.setdefault(round, place)
    return places, starts


def _quantities(names: Iterable[str]) -> list[Quantity]:
    """Group recorded names; those like `α/√v̂, 5 %` are quantiles of one quantity.

    >>> [quantity[:2] for quantity in _quantities(["‖v̂‖²", "α/√v̂, 5 %", "α/√v̂, 50 %", "α/√v̂, 95 %"])]
    [('‖v̂‖²', ''), ('α/√v̂', ': median, and 5 to 95 % of the coordinates')]
    """
    found: list[Quantity] = []
    quantiles: dict[str, dict[float, str]] = {}
    for name in names:
        if match := _QUANTILE.fullmatch(name):
            quantiles.setdefault(match[1], {})[float(match[2])] = name
        else:
            found.append(Quantity(name, "", name))
    for name, parts in quantiles.items():
        low, high, middle = min(parts), max(parts), min(parts, key=lambda part: abs(part - 50))
        centre = "median" if middle == 50 else f"{middle:g} % quantile"
        detail = f": {centre}, and {low:g} to {high:g} % of the coordinates"
        found.append(Quantity(name, detail, parts[middle], parts[low], parts[high]))
    return found


def _lines(
    points: Sequence[TrajectoryPoint], quantities: Sequence[Quantity], places: dict[tuple[int, int], int]
) -> dict[str, Any]:
    ordered = sorted(points, key=lambda point: (point.round, point.step))

    def values(name: str) -> list[float | None]:
        return plain(point.values.get(name) for point in ordered)

    return {
        "client": ordered[0].client,
        "x": [places[point.round, point.step] for point in ordered],
        "round": [point.round for point in ordered],
        "step": [point.step for point in ordered],
        "values": {
            quantity.name: {"y": values(quantity.middle)}
            | ({"low": values(quantity.low), "high": values(quantity.high)} if quantity.low and quantity.high else {})
            for quantity in quantities
        },
    }
