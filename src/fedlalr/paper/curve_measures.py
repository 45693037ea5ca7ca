"""The measures of a curve behind the verdicts, and the comparison of two curves.

A failed run counts as accuracy 0 and infinite loss from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fedlalr.paper.curves import Array, Curves, PanelCurves
from fedlalr.paper.verdicts import EQUIVALENT, EQUIVALENT_LOSS, Outcome
from fedlalr.report.statistics import ConfidenceInterval, paired_difference

Measure = Callable[[Curves], Array]
"""One number per seed."""


def early_accuracy(curves: Curves) -> Array:
    return _mean_of_first(_accuracy(curves), 4)


def final_accuracy(curves: Curves) -> Array:
    return _final(_accuracy(curves))


def half_accuracy(curves: Curves) -> Array:
    """Over the first half of the rounds."""
    return _mean_of_first(_accuracy(curves), 2)


def early_loss(curves: Curves) -> Array:
    return _mean_of_first(_loss(curves), 4)


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


def early_roughness(curves: Curves) -> Array:
    """The same over the first quarter of the rounds."""
    accuracy = _accuracy(curves)
    falls: Array = np.maximum(0, -np.diff(accuracy[:, : -(-accuracy.shape[1] // 4)], axis=1)).sum(axis=1)
    return falls


@dataclass(frozen=True)
class Quantity:
    """A measure with its name, and how its values and their differences are printed."""

    name: str
    measure: Measure
    scale: float = 100.0
    digits: int = 1
    unit: str = " %"
    step: str = " points"
    alike: float = EQUIVALENT
    """The largest difference of two values that are alike."""

    def text(self, value: float) -> str:
        """
        >>> FINAL.text(0.825), ROUGHNESS.text(0.031), rounds_to(0.7).text(math.inf)
        ('82.5 %', '3.1 points', 'never')
        """
        if not math.isfinite(value):
            return "never" if self.step == " rounds" else "infinite"
        return f"{value * self.scale:.{self.digits}f}{self.unit}"

    def signed(self, value: float) -> str:
        """
        >>> FINAL.signed(-0.0125), FINAL_LOSS.signed(0.5)
        ('−1.2', '+0.500')
        """
        return f"{value * self.scale:+.{self.digits}f}".replace("-", "−")


def rounds_to(target: float) -> Quantity:
    """The first round at or above an accuracy; infinite if there is none."""

    def measure(curves: Curves) -> Array:
        reached = _accuracy(curves) >= target
        rounds: Array = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, np.inf)
        return rounds

    return Quantity(f"first round at {target * 100:g} %", measure, 1.0, 1, "", " rounds")


EARLY = Quantity("early accuracy", early_accuracy)
HALF = Quantity("accuracy over the first half", half_accuracy)
FINAL = Quantity("final accuracy", final_accuracy)
EARLY_LOSS = Quantity("early test loss", early_loss, 1.0, 3, "", "", EQUIVALENT_LOSS)
FINAL_LOSS = Quantity("final test loss", final_loss, 1.0, 3, "", "", EQUIVALENT_LOSS)
FALL = Quantity("largest fall", largest_drop, unit=" points")
ROUGHNESS = Quantity("roughness", roughness, unit=" points")
EARLY_ROUGHNESS = Quantity("roughness over the first quarter", early_roughness, unit=" points")


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
    """first − second of some measure, for every pair of runs with the same seed."""

    first: Array
    second: Array
    seeds: tuple[int, ...]

    @property
    def differences(self) -> Array:
        """Zero where both are infinite: neither run reached the target, or both failed."""
        with np.errstate(invalid="ignore"):
            return np.where(self.first == self.second, 0.0, self.first - self.second)

    @property
    def mean(self) -> float:
        return float(self.differences.mean())

    @property
    def interval(self) -> ConfidenceInterval:
        """Student's 95 % interval of the difference; without ends for one seed, and for infinite values."""
        if len(self.seeds) == 1 or not (np.isfinite(self.first).all() and np.isfinite(self.second).all()):
            return ConfidenceInterval(self.mean, None, None)
        return paired_difference(self.first.tolist(), self.second.tolist())

    def between(self, low: float = -np.inf, high: float = np.inf) -> Outcome:
        """Whether the difference lies between two limits: undecided if its interval contains one of them.

        Without an interval the runs decide, and must agree.
        """
        ends = self.interval
        bottom = float(self.differences.min()) if ends.low is None else ends.low
        top = float(self.differences.max()) if ends.high is None else ends.high
        above, below = low < bottom or low == -np.inf, top < high or high == np.inf
        if above and below:
            return "holds"
        return "does not hold" if (top <= low and not above) or (bottom >= high and not below) else "undecided"


def gap(measure: Measure, first: Curves, second: Curves) -> Gap | None:
    """The paired difference, or None if no seed has both."""
    seeds = tuple(seed for seed in first.seeds if seed in second.seeds)
    if not seeds:
        return None
    mine, theirs = (measure(one)[[one.seeds.index(seed) for seed in seeds]] for one in (first, second))
    return Gap(mine, theirs, seeds)


def _accuracy(curves: Curves) -> Array:
    return np.nan_to_num(curves.accuracy, nan=0.0)


def _loss(curves: Curves) -> Array:
    return np.nan_to_num(curves.loss, nan=np.inf, posinf=np.inf)


def _mean_of_first(values: Array, part: int) -> Array:
    """Over the first half, third, quarter … of the rounds."""
    mean: Array = values[:, : -(-values.shape[1] // part)].mean(axis=1)
    return mean


def _final(values: Array) -> Array:
    mean: Array = values[:, -max(1, values.shape[1] // 10) :].mean(axis=1)
    return mean
