"""The step sizes under which the paper states its rates: √(N/(KT)) or √(N/ΣK_t), capped at 3ε/(20L)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedlalr.theory import checks


@dataclass(frozen=True)
class StepSize:
    """A step size α, and the two numbers of which it is the minimum."""

    alpha: float
    uncapped: float
    """√(N/(KT)), or √(N/ΣK_t)."""
    cap: float
    """3ε/(20L)."""

    @property
    def cap_binds(self) -> bool:
        """Whether the cap is the minimum, so that α does not scale with N and T, as the rate 1/√(NKT) requires."""
        return self.cap < self.uncapped


def cap(*, eps: float, L: float) -> float:
    """3ε/(20L), the largest step size the theorems allow.

    >>> cap(eps=1.0, L=1.0)
    0.15
    """
    return 3 * checks.positive("eps", eps) / (20 * checks.positive("L", L))


def largest_smoothness(*, eps: float, alpha: float) -> float:
    """The largest L for which α satisfies the cap: 3ε/(20α).

    >>> f"{largest_smoothness(eps=1e-8, alpha=2e-3):.2g}"  # the paper's rate for CIFAR
    '7.5e-07'
    """
    return 3 * checks.positive("eps", eps) / (20 * checks.positive("alpha", alpha))


def step_size(*, N: int, K: int, T: int, eps: float, L: float) -> StepSize:
    """α = min(√(N/(KT)), 3ε/(20L)) of Corollaries 1 and 2: N clients, K local steps, T rounds.

    >>> step_size(N=4, K=10, T=1000, eps=1.0, L=1.0).alpha
    0.02
    """
    steps = checks.count("K", K) * checks.count("T", T)
    return smaller(checks.count("N", N), steps, cap(eps=eps, L=L))


def adaptive_step_size(*, N: int, intervals: Sequence[int] | np.ndarray, eps: float, L: float) -> StepSize:
    """α = min(√(N/ΣK_t), 3ε/(20L)) of Theorem 2, for the local steps K_0 … K_{T−1} of every round."""
    steps = int(checks.intervals(intervals).sum())
    return smaller(checks.count("N", N), steps, cap(eps=eps, L=L))


MOST_ROUNDS = 10**8
"""The most rounds that are enumerated one by one."""


def log_intervals(T: int, *, start: int, base: float) -> NDArray[np.int64]:
    """K_t = start + ⌊log_base t⌋ for t = 1 … T: the adaptive interval of the paper's experiments.

    >>> log_intervals(17, start=3, base=4.0).tolist()
    [3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 5, 5]
    """
    if checks.count("T", T) > MOST_ROUNDS:
        raise ValueError(f"T must be at most {MOST_ROUNDS:,} to enumerate the local steps of every round, not {T:,}")
    checks.growth(start, base)
    powers = [float(base)]  # compared with t, because a quotient of logarithms can be rounded below a whole number
    while powers[-1] <= T:
        powers.append(powers[-1] * base)
    return np.searchsorted(np.array(powers), np.arange(1, T + 1), side="right") + start


def smaller(N: int, steps: int, largest: float) -> StepSize:
    """The capped step size of N clients with `steps` local steps each."""
    uncapped = math.sqrt(N / steps)
    return StepSize(alpha=min(uncapped, largest), uncapped=uncapped, cap=largest)
