"""Statistics over a few seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
"""Of every interval: tables say 95 %."""
ROUNDING = 1e-12
"""Deviations below this share of the values are rounding errors."""


class MeanAndDeviation(NamedTuple):
    """A mean and the sample standard deviation; None for a single value."""

    mean: float
    deviation: float | None


class ConfidenceInterval(NamedTuple):
    """A mean with its confidence interval; the ends are None for a single value, or values without spread."""

    mean: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def spread(values: Sequence[float]) -> MeanAndDeviation:
    """
    >>> spread([1.0, 3.0])
    MeanAndDeviation(mean=2.0, deviation=1.4142135623730951)
    """
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return MeanAndDeviation(mean, None)
    deviations = math.hypot(*(value - mean for value in values))  # squares of diverged losses would overflow
    return MeanAndDeviation(mean, deviations / math.sqrt(len(values) - 1))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> ConfidenceInterval:
    """The mean of first − second over pairs (runs of one seed share data, start and cohorts), with Student's interval.

    With three seeds Student's factor is 4.3, so the interval is wide: three seeds do not allow more. Differences that
    are all equal, up to rounding, have no interval: they coincide by chance or because of too few digits, so they do
    not show the spread between seeds, on which the interval is based.

    >>> [round(end, 3) for end in paired_difference([0.90, 0.92, 0.91], [0.88, 0.89, 0.90])]
    [0.02, -0.005, 0.045]
    >>> paired_difference([0.75, 0.5], [0.5, 0.25])
    ConfidenceInterval(mean=0.25, low=None, high=None)
    """
    if len(first) != len(second) or not first:
        raise ValueError(
            f"pairs need the same number of values on both sides, at least one, not {len(first)} and {len(second)}"
        )
    mean, deviation = spread([a - b for a, b in zip(first, second, strict=True)])
    largest = max(abs(value) for value in (*first, *second))
    if deviation is None or deviation <= ROUNDING * largest:
        return ConfidenceInterval(mean, None, None)
    from scipy.stats import t  # a slow import that only this function needs

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(first) - 1)) * deviation / math.sqrt(len(first))
    return ConfidenceInterval(mean, mean - half, mean + half)
