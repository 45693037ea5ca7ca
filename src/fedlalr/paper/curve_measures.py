"""The measures of a curve behind the verdicts, and the comparison of two curves.

A failed run counts as accuracy 0 and infinite loss from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedlalr.paper.curves import Array, Curves, PanelCurves
from fedlalr.paper.verdicts import EQUIVALENT, EQUIVALENT_LOSS, Outcome
from fedlalr.report.statistics import ConfidenceInterval, paired_difference, spread

Measure = Callable[[Curves], Array]
"""One number per seed."""


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


EARLY = Quantity("early accuracy", lambda curves: _first(4, _accuracy(curves)).mean(axis=1))
HALF = Quantity("accuracy over the first half", lambda curves: _first(2, _accuracy(curves)).mean(axis=1))
FINAL = Quantity("final accuracy", lambda curves: _last_tenth(_accuracy(curves)).mean(axis=1))
EARLY_LOSS = Quantity(
    "early test loss", lambda curves: _first(4, _losses(curves.loss)).mean(axis=1), 1.0, 3, "", "", EQUIVALENT_LOSS
)
FINAL_LOSS = Quantity(
    "final test loss", lambda curves: _last_tenth(_losses(curves.loss)).mean(axis=1), 1.0, 3, "", "", EQUIVALENT_LOSS
)
FINAL_TRAINING_LOSS = replace(
    FINAL_LOSS, name="final training loss", measure=lambda curves: _last_tenth(_losses(curves.train_loss)).mean(axis=1)
)
FALL = Quantity("largest fall", lambda curves: _below_best(_accuracy(curves)).max(axis=1), unit=" points")
"""Of the accuracy below its best so far."""
ROUGHNESS = Quantity("roughness", lambda curves: _falls(_accuracy(curves)).sum(axis=1), unit=" points")
"""The sum of all falls from one round to the next."""
EARLY_ROUGHNESS = Quantity(
    "roughness over the first quarter", lambda curves: _falls(_first(4, _accuracy(curves))).sum(axis=1), unit=" points"
)


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
            *spread(EARLY.measure(curves).tolist()),
            *spread(FINAL.measure(curves).tolist()),
            *spread(FALL.measure(curves).tolist()),
            float(np.nan_to_num(curves.uploaded).max(axis=1).mean()) / 1e6,
        )
        for result in results
        for curves in result.lines.values()
    ]


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

    def on_side(self, lower: bool) -> Outcome:
        """Whether the difference is above zero, or below."""
        return self.between(high=0.0) if lower else self.between(low=0.0)


def gap(measure: Measure, first: Sequence[Curves], second: Sequence[Curves]) -> Gap | None:
    """The paired difference of two curves, each perhaps in several panels, or None if no seed has all."""
    seeds = shared_seeds([*first, *second])
    return Gap(mean_of(measure, first, seeds), mean_of(measure, second, seeds), seeds) if seeds else None


def shared_seeds(curves: Sequence[Curves]) -> tuple[int, ...]:
    return tuple(seed for seed in curves[0].seeds if all(seed in one.seeds for one in curves))


def mean_of(measure: Measure, curves: Sequence[Curves], seeds: Sequence[int]) -> Array:
    """The mean of a measure over several curves, for each of the seeds."""
    values = [measure(one)[[one.seeds.index(seed) for seed in seeds]] for one in curves]
    return np.asarray(np.mean(values, axis=0))


def _accuracy(curves: Curves) -> Array:
    return np.nan_to_num(curves.accuracy, nan=0.0)


def _losses(values: Array) -> Array:
    return np.nan_to_num(values, nan=np.inf, posinf=np.inf)


def _first(part: int, values: Array) -> Array:
    """The first half, third, quarter … of the rounds."""
    return values[:, : -(-values.shape[1] // part)]


def _last_tenth(values: Array) -> Array:
    return values[:, -max(1, values.shape[1] // 10) :]


def _below_best(accuracy: Array) -> Array:
    return np.maximum.accumulate(accuracy, axis=1) - accuracy


def _falls(accuracy: Array) -> Array:
    return np.maximum(0, -np.diff(accuracy, axis=1))
