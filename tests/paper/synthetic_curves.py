"""Curves of known shape, to try verdicts on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.config import load, with_method
from fedlalr.federation.trajectory import V_HAT_SQUARED, TrajectoryPoint
from fedlalr.paper.curves import Array, Curves, PanelCurves, stack
from fedlalr.paper.plans import INTERVALS, LOCAL, Beside, FigureLine, Panel
from fedlalr.report.tables import name_of

ROUNDS = 40
CONFIG = load("quickstart", ["rounds=40"])


def rising(final: float, half: float = 5.0, rounds: int = ROUNDS) -> Array:
    """Rises to `final`, half of it in `half` rounds."""
    t = np.arange(1, rounds + 1)
    return final * (1 - 0.5 ** (t / half))


def with_drop(curve: Array, depth: float, at: int = 20) -> Array:
    """The same with one round that is lower by `depth`."""
    dropped = curve.copy()
    dropped[at] -= depth
    return dropped


def curves(
    *accuracy: Sequence[float] | Array,
    loss: Sequence[Sequence[float] | Array] | None = None,
    seeds: Sequence[int] | None = None,
    failures: Sequence[str | None] | None = None,
    trajectories: Sequence[Sequence[TrajectoryPoint]] = (),
    passes: float = math.nan,
    label: str = "a curve",
) -> Curves:
    """One row for each seed. The loss falls as the accuracy rises, unless it is given."""
    rows = stack([list(row) for row in accuracy], ROUNDS)
    losses = stack([list(row) for row in loss], ROUNDS) if loss is not None else 2.3 * (1 - rows)
    return Curves(
        label=label,
        seeds=tuple(seeds if seeds is not None else range(len(rows))),
        accuracy=rows,
        loss=losses,
        train_loss=losses,
        uploaded=np.where(np.isnan(rows), np.nan, 1e9 * np.arange(1, ROUNDS + 1)),
        failures=tuple(failures if failures is not None else [None] * len(rows)),
        trajectories=tuple(map(tuple, trajectories)),
        passes=passes,
    )


def panel(
    lines: Mapping[str, Curves],
    title: str = "data, setting",
    short: str = "setting",
    group: str = "data",
    beside: Sequence[Beside] = (),
) -> PanelCurves:
    """A panel of these lines; if it has several methods, all six were planned."""
    if "fedlalr" in lines and len(lines) > 1:
        planned = [FigureLine(method, name_of(method), with_method(CONFIG, method)) for method in PAPER_METHODS]
    else:
        planned = [FigureLine(key, key, CONFIG) for key in lines]
    planned += [one.line(CONFIG) for one in beside]
    return PanelCurves(Panel(f"{group}-{short}", title, tuple(planned), group, short), lines)


def interval_panel(unit: str, lines: Sequence[Curves]) -> PanelCurves:
    """The three intervals in a unit, with the first of them run."""
    planned = [FigureLine(key, label, CONFIG) for label, key in zip(INTERVALS, LOCAL[unit], strict=True)]
    run = {line.key: one for line, one in zip(planned, lines, strict=False)}
    return PanelCurves(Panel(f"data-{unit}", f"data, in {unit}", tuple(planned), "data", f"in {unit}"), run)


def six(**changes: Array | Curves) -> dict[str, Curves]:
    """All six methods rising alike, FedLALR first and fastest, with some of them changed."""
    lines = {method: curves(rising(0.60 - 0.01 * i, half=5 + i)) for i, method in enumerate(PAPER_METHODS)}
    return lines | {name: one if isinstance(one, Curves) else curves(one) for name, one in changes.items()}


def moments(
    first: Mapping[int, float], pace: Mapping[int, float], rounds: Sequence[int] = (1, 3)
) -> list[TrajectoryPoint]:
    """‖v̂‖² that grows evenly over five local steps, for every client."""
    return [
        TrajectoryPoint(t, client, k, {V_HAT_SQUARED: first[client] + pace[client] * (k - 1)})
        for t in rounds
        for client in first
        for k in range(1, 6)
    ]
