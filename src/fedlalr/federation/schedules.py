"""Learning-rate schedules: functions from the round to a multiplier of the algorithm's `lr`.

A schedule is called with the round (from 1), or with the round and the number of rounds of the run if it takes two
arguments. Your own schedule is any such function: `lambda round: 0.5 if round > 50 else 1.0`.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fedlalr.common.checks import MOST, check_instance, takes
from fedlalr.common.named import check_known, created, options_of
from fedlalr.common.option_types import Bounds, Checked, Count, Fraction, Share

Schedule = Callable[[int], float] | Callable[[int, int], float]
Warmup = Annotated[int, Bounds(ge=0, le=MOST)]
"""Rounds in which the rate rises linearly; the next round has the full rate."""

LEAST_MULTIPLIER = 1e-30
"""Lower bound of the multiplier: too small to move a parameter, but not 0, as some methods divide by their rate."""
CHECKED_ROUNDS = 100_000
"""Rounds whose rates are checked before a run starts."""


@dataclass(frozen=True)
class Constant(Checked):
    """The same rate in every round after `warmup` rounds of linear warm-up.

    >>> [Constant(warmup=1)(t) for t in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    """

    called = "{owner}'s {field}"
    warmup: Warmup = 0

    def __call__(self, round: int) -> float:
        return min(1.0, round / (self.warmup + 1))


@dataclass(frozen=True)
class Exponential(Checked):
    """Multiply the rate by `factor` every `every` rounds, after `warmup` rounds of linear warm-up.

    >>> [Exponential(0.5, every=2)(t) for t in (1, 2, 3, 4, 5)]
    [1.0, 1.0, 0.5, 0.5, 0.25]
    >>> [Exponential(0.5, warmup=1)(t) for t in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.25]
    """

    called = "{owner}'s {field}"
    factor: Share = 0.998
    every: Count = 1
    warmup: Warmup = 0

    def __call__(self, round: int) -> float:
        if round <= self.warmup:
            return round / (self.warmup + 1)
        return float(self.factor ** ((round - self.warmup - 1) // self.every))


@dataclass(frozen=True)
class _Falling(Checked, ABC):
    """Rise linearly during the first `warmup` rounds, reach 1 in the next round, then fall to `final` in the last.

    With the default `final` the last round still trains; with 0 it would not.
    """

    called = "{owner}'s {field}"
    warmup: Warmup = 0
    final: Fraction = 0.01

    def __call__(self, round: int, rounds: int) -> float:
        if self.warmup >= rounds:
            raise ValueError(
                f"{type(self).__name__}'s warmup takes {self.warmup} rounds, but the run has only {rounds}; use fewer "
                f"rounds of warm-up, or more rounds"
            )
        if round <= self.warmup:
            return round / (self.warmup + 1)
        part = (round - self.warmup - 1) / max(rounds - self.warmup - 1, 1)
        return self.final + (1 - self.final) * self._left(part)

    @abstractmethod
    def _left(self, part: float) -> float:
        """What is left of the way down, from 1 to 0."""


@dataclass(frozen=True)
class Cosine(_Falling):
    """Half a cosine from 1 to `final` in the last round, after `warmup` rounds of linear warm-up.

    >>> [round(Cosine(warmup=1, final=0.1)(t, 4), 3) for t in (1, 2, 3, 4)]
    [0.5, 1.0, 0.55, 0.1]
    """

    def _left(self, part: float) -> float:
        return (1 + math.cos(math.pi * part)) / 2


@dataclass(frozen=True)
class Linear(_Falling):
    """A straight line from 1 to `final` in the last round, after `warmup` rounds of linear warm-up.

    >>> [round(Linear(warmup=1, final=0.0)(t, 4), 3) for t in (1, 2, 3, 4)]
    [0.5, 1.0, 0.5, 0.0]
    """

    def _left(self, part: float) -> float:
        return 1 - part


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    kind.__name__.lower(): kind for kind in (Constant, Exponential, Cosine, Linear)
}
"""Schedules by their names in configurations."""


def create(name: str, **given: Any) -> Schedule:
    """A schedule by its name in configurations."""
    schedule: Schedule = created(name, given, SCHEDULES, "there is no schedule")
    return schedule


def options(name: str) -> dict[str, Any]:
    """The options of a schedule with their defaults."""
    check_known("there is no schedule", name, SCHEDULES)
    return options_of(SCHEDULES[name])


def check_schedule(schedule: object) -> None:
    """Reject anything but a function of the round, or of the round and the number of rounds."""
    check_instance("schedule", schedule)
    if not callable(schedule) or not any(takes(schedule, count, unknown=False) for count in (1, 2)):
        raise TypeError(
            f"schedule must be one of fl.schedules, such as fl.schedules.Cosine(warmup=5), or a function of the round, "
            f"such as lambda round: 0.99**round, not {schedule!r}"
        )


def depends_on_rounds(schedule: Schedule) -> bool:
    """Whether a schedule depends on the number of rounds, so that a run cannot be extended."""
    return not takes(schedule, 1, unknown=False)


def rates(schedule: Any, lr: float, rounds: int) -> Callable[[int], float]:
    """The rate of every round (from 1): `lr` times the multiplier, which is at least `LEAST_MULTIPLIER`.

    A multiplier that gives a negative or non-finite rate is rejected.
    """
    two = depends_on_rounds(schedule)

    def rate(round: int) -> float:
        given = schedule(round, rounds) if two else schedule(round)
        try:
            value = float(given)
        except (TypeError, ValueError):  # not a number
            value = math.nan
        if not (value >= 0 and math.isfinite(lr * value)):
            raise ValueError(
                f"the schedule returned {given!r} in round {round}, and the learning rate would be {lr!r} times that; "
                f"it must return a finite number of at least 0"
            )
        return lr * max(value, LEAST_MULTIPLIER)

    return rate


def check_rates(schedule: Schedule, lr: float, rounds: int) -> None:
    """Reject a schedule that gives an invalid rate in one of the first `CHECKED_ROUNDS` rounds."""
    rate = rates(schedule, lr, rounds)
    warmup = schedule.warmup if isinstance(schedule, Constant | Exponential) else 0  # the others reject it
    if warmup >= rounds:
        warnings.warn(
            f"{type(schedule).__name__}'s warmup takes {warmup} rounds, but the run has only {rounds}, so it never "
            f"reaches the full learning rate unless it is resumed; use fewer rounds of warm-up, or more rounds",
            stacklevel=5,  # at the call of `fl.run`
        )
    for round in range(1, min(rounds, CHECKED_ROUNDS) + 1):
        rate(round)
