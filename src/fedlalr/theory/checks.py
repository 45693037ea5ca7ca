"""Checks of the formulas' arguments. They also accept NumPy's numbers, and return Python's."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedlalr.common.checks import whole_number


def positive(name: str, value: float) -> float:
    """A finite number above zero."""
    number = _number(name, value)
    if not number > 0:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}")
    return number


def not_negative(name: str, value: float) -> float:
    """A finite number of at least zero."""
    number = _number(name, value)
    if number < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, not {value!r}")
    return number


def count(name: str, value: int) -> int:
    """A whole number of at least one."""
    return whole_number(name, value, most=None)


LEAST_BASE = 1.001
"""With a smaller base the logarithm of a large number is too large to enumerate."""


def growth(start: int, base: float) -> None:
    """Reject a start or base that K_t = start + ⌊log_base t⌋ is not defined for."""
    count("start", start)
    if not positive("base", base) >= LEAST_BASE:
        raise ValueError(f"base must be at least {LEAST_BASE} so that the logarithm grows slowly, not {base!r}")


def intervals(values: Sequence[int] | np.ndarray) -> NDArray[np.int64]:
    """The local steps K_0 … K_{T−1} of every round: whole, at least 1, non-decreasing."""
    array = np.asarray(values)
    if array.ndim != 1 or array.size == 0:
        raise ValueError("intervals must be a non-empty list with the local steps of every round, such as [3, 3, 3, 4]")
    if array.dtype.kind not in "iu" or array.min() < 1:
        raise ValueError(f"intervals must be whole numbers of at least 1, not {values!r}")
    if (np.diff(array) < 0).any():
        raise ValueError("intervals must not decrease: Theorem 2 bounds every K_t by the last one, K_{T-1}")
    return array.astype(np.int64)


def _number(name: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not {value!r}") from None
    if isinstance(value, bool | str) or not math.isfinite(number):
        raise ValueError(f"{name} must be a finite number, not {value!r}")
    return number
