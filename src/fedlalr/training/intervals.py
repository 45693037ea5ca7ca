"""How long a client trains in a round: the interval between two synchronisations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedlalr.common.checks import check_choice, whole_number

LEAST_BASE = 1.001
"""With a smaller base the second round would have hundreds more steps than the first, and later ones far too many."""
MOST_STEPS = 10_000_000
"""Per client and round: all batches of a round are planned at once, and the plan must fit into memory."""
_WHOLE_NUMBERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


class Interval(Protocol):
    """The number of local steps of every client in a round."""

    def steps(self, round: int, batches_per_pass: Tensor) -> Tensor:
        """K for each client in round t (from 1), given the batches in one pass over its data (int64 `[C]`)."""


@dataclass(frozen=True)
class Counted:
    """An interval of some steps or epochs."""

    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", whole_number(f"{type(self).__name__}'s count", self.count, most=MOST_STEPS))


class Steps(Counted):
    """K local steps in every round, regardless of a client's size."""

    def steps(self, round: int, batches_per_pass: Tensor) -> Tensor:
        return batches_per_pass.new_full(batches_per_pass.shape, self.count)


class Epochs(Counted):
    """E passes over the client's data in every round."""

    def steps(self, round: int, batches_per_pass: Tensor) -> Tensor:
        return batches_per_pass * self.count


@dataclass(frozen=True)
class LogInterval:
    """The adaptive interval of Theorem 2: K_t = start + ⌊log_base t⌋, t counted from 1.

    >>> [LogInterval(start=3, base=4.0).length(t) for t in (1, 3, 4, 15, 16, 64)]
    [3, 3, 4, 4, 5, 6]
    """

    start: int
    base: float
    unit: Literal["steps", "epochs"] = "steps"

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", whole_number("LogInterval's start", self.start, most=MOST_STEPS))
        is_number = isinstance(self.base, int | float) and not isinstance(self.base, bool)
        if not is_number or not LEAST_BASE <= self.base < float("inf"):
            raise ValueError(f"LogInterval's base must be a finite number of at least {LEAST_BASE}, not {self.base!r}")
        check_choice("LogInterval's unit", self.unit, ("steps", "epochs"))

    def length(self, round: int) -> int:
        """K_t, by repeated multiplication: a floating-point logarithm would miss exact powers."""
        base = int(self.base) if self.base == int(self.base) else self.base  # only a whole base has whole powers
        power, exponent = base, 0
        while power <= round:
            power, exponent = power * base, exponent + 1
        return self.start + exponent

    def steps(self, round: int, batches_per_pass: Tensor) -> Tensor:
        if self.unit == "epochs":
            return batches_per_pass * self.length(round)
        return batches_per_pass.new_full(batches_per_pass.shape, self.length(round))


def checked(interval: Interval, steps: Any, clients: int) -> Tensor:
    """The steps of an interval as int64 `[C]`; a user's interval may return anything."""
    name, is_one_each = type(interval).__name__, isinstance(steps, Tensor) and steps.shape == (clients,)
    if not (is_one_each and steps.dtype in _WHOLE_NUMBERS and (steps >= 0).all()):
        raise ValueError(
            f"{name}.steps must return the number of local steps of each of the {clients} clients, such as "
            f"2 * batches_per_pass: a tensor of whole numbers of at least 0, one for each client, not {steps!r}"
        )
    whole: Tensor = steps.to(torch.int64)
    if (whole > MOST_STEPS).any():
        raise ValueError(
            f"{name} gives a client {int(whole.max()):,} local steps in a round, but at most {MOST_STEPS:,} are "
            f"allowed; use fewer epochs or steps, or larger batches"
        )
    return whole
