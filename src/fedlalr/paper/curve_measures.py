"""What the verdicts measure of a curve, and how two curves are told apart.

A run that broke off counts as accuracy 0 and an infinite loss from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedlalr.paper.curves import Array, Curves, PanelCurves
from fedlalr.report.statistics import ConfidenceInterval, paired_difference

Measure = Callable[[Curves], Array]
"""One number for each seed."""

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
    "a run that broke off counts as accuracy 0 from there on",
    "a claim holds where all of its statements hold, and does not hold where one of them fails",
)
"""The words in which verdicts are given."""


def early_accuracy(curves: Curves) -> Array:
    return _early(_accuracy(curves))


def final_accuracy(curves: Curves) -> Array:
    return _final(_accuracy(curves))


def early_loss(curves: Curves) -> Array:
    return _early(_loss(curves))


def final_loss(curves: Curves) -> Array:
    return _final(_loss(curves))


def largest_drop(curves: Curves) -> Array:
    """How far the accuracy falls below its best so far, at most."""
    accuracy = _accuracy(curves)
    drop: Array = (np.maximum.accumulate(accuracy, axis=1) - accuracy).max(axis=1)
    return drop


def roughness(curves: Curves) -> Array:
    """The sum of all falls from one round to the next."""
    falls: Array = np.maximum(0, -np.diff(_accuracy(curves), axis=1)).sum(axis=1)
    return falls


@dataclass(frozen=True)
class Numbers:
    """A curve in numbers: means over its seeds, each with the standard deviation of several seeds."""

    panel: str
    line: str
    seeds: tuple[int, ...]
    early_accuracy: float
    early_accuracy_std: float | None
    final_accuracy: float
    final_accuracy_std: float | None
    largest_fall: float
    """Of the accuracy below its best so far."""
    largest_fall_std: float | None
    megabytes_up: float
    """What all clients have sent, which hardly depends on the seed."""


def summary(results: Sequence[PanelCurves]) -> list[Numbers]:
    """What is compared with what, in numbers: an entry for every curve."""
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
    """Seeds in which the difference is above zero."""
    negative: int

    @property
    def mean(self) -> float:
        return self.interval.mean


def gap(measure: Measure, first: Curves, second: Curves) -> Gap | None:
    """The paired difference, or none where no seed has both."""
    seeds = tuple(seed for seed in first.seeds if seed in second.seeds)
    if not seeds:
        return None
    mine = measure(first)[[first.seeds.index(seed) for seed in seeds]]
    theirs = measure(second)[[second.seeds.index(seed) for seed in seeds]]
    with np.errstate(invalid="ignore"):  # two infinite losses have no difference
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
