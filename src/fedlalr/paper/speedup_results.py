"""Results of a speed-up measurement: its points, the fitted slopes, and their files."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import t as student

from fedlalr.config.errors import ConfigError
from fedlalr.paper.style import write_table

REGIME = 8
"""KT ≥ REGIME · N³ counts as KT ≫ N³."""
CONTROLS = ("local SGD",)
"""Variants that are no form of FedLALR."""


@dataclass(frozen=True)
class SpeedupPoint:
    """N clients in one run: the mean of ‖∇f(x̄)‖² over its local steps, in every repeat."""

    variant: str
    N: int
    rounds: int
    last_interval: int
    steps: int
    """KT, or ΣK_t."""
    alpha: float
    cap_binds: bool
    seed: int
    values: tuple[float, ...]

    @property
    def in_regime(self) -> bool:
        """Whether KT ≫ N³ and the step size is the corollary's, so that the claim applies to this point."""
        return self.steps >= REGIME * self.N**3 and not self.cap_binds

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))


class Fit(NamedTuple):
    """A straight line on logarithmic axes: its slope, with the 95 % confidence interval of the regression."""

    variant: str
    against: str
    points: int
    slope: float
    low: float
    high: float
    spread: float
    """Standard deviation of the slope over the repeats: the random part of the interval."""


_COLUMNS = [field for field in fields(SpeedupPoint) if field.name != "values"]
_READ: Mapping[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float, "bool": "True".__eq__}
"""How a value in `speedup.csv` is read, by the type of its field."""


@dataclass(frozen=True)
class Speedup:
    """All points of a measurement."""

    points: tuple[SpeedupPoint, ...]

    @property
    def variants(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(point.variant for point in self.points))

    def of(self, variant: str) -> tuple[SpeedupPoint, ...]:
        """The points of one variant."""
        return tuple(point for point in self.points if point.variant == variant)

    def longest(self, variant: str) -> tuple[SpeedupPoint, ...]:
        """The points of a variant's longest run, one for every N."""
        steps = max(point.steps for point in self.of(variant))
        return tuple(point for point in self.of(variant) if point.steps == steps)

    @property
    def fits(self) -> tuple[Fit, ...]:
        """For each variant three slopes: against N·K·T in the regime, against N·K·T wherever the step size is not
        capped, and against N alone in the longest run, in the regime. A slope needs at least three points.
        """
        groups = [
            (group, against)
            for variant in self.variants
            for against, group in (
                ("NKT", [point for point in self.of(variant) if point.in_regime]),
                ("NKT, also outside the regime", [point for point in self.of(variant) if not point.cap_binds]),
                ("N, longest run", [point for point in self.longest(variant) if point.in_regime]),
            )
        ]
        return tuple(fit(group, against) for group, against in groups if len(group) > 2)

    def write(self, folder: Path) -> list[Path]:
        """Write `speedup.csv`, a line per point and repeat, and `speedup-fits.csv`, a line per slope."""
        folder.mkdir(parents=True, exist_ok=True)
        columns = (*(column.name for column in _COLUMNS), "N_steps", "in_regime", "repeat", "mean_squared_gradient")
        lines = [
            (
                *(getattr(point, column.name) for column in _COLUMNS),
                point.N * point.steps,
                point.in_regime,
                repeat,
                value,
            )
            for point in self.points
            for repeat, value in enumerate(point.values)
        ]
        # with ten digits the slopes of the same points are the same on every processor
        fits = [[f"{value:.10g}" if isinstance(value, float) else value for value in fit] for fit in self.fits]
        return [
            write_table(folder / "speedup.csv", columns, lines),
            write_table(folder / "speedup-fits.csv", Fit._fields, fits),
        ]

    @classmethod
    def read(cls, folder: Path) -> Speedup:
        """Read what `write` wrote; empty without a file."""
        path = folder / "speedup.csv"
        if not path.exists():
            return cls(())
        try:
            with path.open(newline="", encoding="utf-8") as file:
                groups = itertools.groupby(csv.DictReader(file), key=itemgetter("variant", "steps", "N"))
                return cls(tuple(_point(list(lines)) for _, lines in groups))
        except (ValueError, TypeError, KeyError, csv.Error) as error:
            raise ConfigError(f"{path} is damaged ({error}); move it away, and it will be measured again") from error


def fit(points: Sequence[SpeedupPoint], against: str) -> Fit:
    """Fit a line through the logarithms of the means of at least three points against those of N·K·T."""
    size = np.log([point.N * point.steps for point in points])
    means = np.log([point.mean for point in points])
    slope, height = np.polyfit(size, means, deg=1)
    repeated = np.polyfit(size, np.log([point.values for point in points]), deg=1)[0]
    off = means - (slope * size + height)
    free = len(points) - 2
    error = np.sqrt((off @ off) / free / ((size - size.mean()) ** 2).sum())
    half = float(student.ppf(0.975, free) * error)
    spread = float(repeated.std(ddof=1)) if len(repeated) > 1 else float("nan")
    return Fit(points[0].variant, against, len(points), float(slope), float(slope) - half, float(slope) + half, spread)


def _point(lines: Sequence[Mapping[str, str]]) -> SpeedupPoint:
    values = tuple(float(line["mean_squared_gradient"]) for line in lines)
    read = {column.name: _READ[str(column.type)](lines[0][column.name]) for column in _COLUMNS}
    return SpeedupPoint(**read, values=values)
