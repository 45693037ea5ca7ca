"""The measures of a curve behind the verdicts, and the comparison of two curves.

A failed run counts as accuracy 0 and infinite loss from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedlalr.paper.curves import Array, Curves, PanelCurves
from fedlalr.report.statistics import ConfidenceInterval, paired_difference

Measure = Callable[[Curves], Array]
"""One number per seed."""

MARKED_DROP = 0.05
EQUIVALENT = 0.02
SLIGHTLY = 0.05

DEFINITIONS = (
    "early accuracy or loss: its mean over the first quarter of the rounds",
    "final accuracy or loss: its mean over the last tenth of the rounds",
    f"marked drop: the accuracy falls more than {MARKED_DROP * 100:g} points below its best so far",
    "roughness: the sum of all falls of the accuracy from one round to the next",
    "above, below: by the mean over the seeds that both curves have, paired by seed",
    f"like: at most {EQUIVALENT * 100:g} points apart; slightly: at most {SLIGHTLY * 100:g} points",
    "a run that failed counts as accuracy 0 from then on",
    "a claim holds if all of its statements hold, and does not hold if one of them fails",
)
"""The terms used in verdicts."""


def early_accuracy(curves: Curves) -> Array:
    return _early(_accuracy(curves))


def final_accuracy(curves: Curves) -> Array:
    return _final(_accuracy(curves))


def early_loss(curves: Curves) -> Array:
    return _early(_loss(curves))


def final_loss(curves: Curves) -> Array:
    return _final(_loss(curves))


def largest_drop(curves: Curves) -> Array:
    """The largest fall of the accuracy below its best so far."""
    accuracy = _accuracy(curves)
    drop: Array = (np.maximum.accumulate(accuracy, axis=1) - accuracy).max(axis=1)
    return drop


def roughness(curves: Curves) -> Array:
    """The sum of all falls from one round to the next."""
    falls: Array = np.maximum(0, -np.diff(_accuracy(curves), axis=1)).sum(axis=1)
    return falls


@dataclass(frozen=True)
class Numbers:
    """A curve as numbers: means over its seeds, with the standard deviation if there are several."""

    panel: str
    line: str
    seeds: tuple[int, ...]
    early_accuracy: float
    early_accuracy_std: float | None
    final_accuracy: float
    final_accuracy_std: float | None
    largest_fall: float
    """Largest fall of the accuracy below its best so far."""
    largest_fall_std: float | None
    megabytes_up: float
    """Bytes sent by all clients, which hardly depend on the seed."""


def summary(results: Sequence[PanelCurves]) -> list[Numbers]:
    """The compared curves as numbers: one entry per curve."""
    return [
        Numbers(
            result.panel.short,
            curves.label,
            curves.seeds,
            *_mean_and_deviation(early_accuracy(curves)),
            *_mean_and_deviation(final_accuracy(curves)),
            *_mean_and_deviation(largest_drop(curves)),
            float(np.nan_to_num(curves.uploaded).max(axis=1).mean()) / 1e6,
        )
        for result in results
        for curves in result.lines.values()
    ]


def _mean_and_deviation(values: Array) -> tuple[float, float | None]:
    return float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None


@dataclass(frozen=True)
class Gap:
    """first − second of some measure, over the seeds that both have."""

    first: float
    second: float
    interval: ConfidenceInterval
    seeds: tuple[int, ...]
    positive: int
    """Number of seeds with a positive difference."""
    negative: int

    @property
    def mean(self) -> float:
        return self.interval.mean


def gap(measure: Measure, first: Curves, second: Curves) -> Gap | None:
    """The paired difference, or None if no seed has both."""
    seeds = tuple(seed for seed in first.seeds if seed in second.seeds)
    if not seeds:
        return None
    mine = measure(first)[[first.seeds.index(seed) for seed in seeds]]
    theirs = measure(second)[[second.seeds.index(seed) for seed in seeds]]
    with np.errstate(invalid="ignore"):  # the difference of two infinite losses is undefined
        difference = mine - theirs
        interval = (
            paired_difference(mine.tolist(), theirs.tolist())
            if np.isfinite(mine).all() and np.isfinite(theirs).all()
            else ConfidenceInterval(float(mine.mean() - theirs.mean()), None, None)
        )
    positive, negative = int(np.sum(difference > 0)), int(np.sum(difference < 0))
    return Gap(float(mine.mean()), float(theirs.mean()), interval, seeds, positive, negative)


def _accuracy(curves: Curves) -> Array:
    return np.nan_to_num(curves.accuracy, nan=0.0)


def _loss(curves: Curves) -> Array:
    return np.nan_to_num(curves.loss, nan=np.inf, posinf=np.inf)


def _early(values: Array) -> Array:
    mean: Array = values[:, : -(-values.shape[1] // 4)].mean(axis=1)
    return mean


def _final(values: Array) -> Array:
    mean: Array = values[:, -max(1, values.shape[1] // 10) :].mean(axis=1)
    return mean
