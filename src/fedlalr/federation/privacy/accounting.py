"""How much privacy a run has spent: ε at a given δ.

A round samples every client independently with probability `rate` (Poisson sampling), sums the clipped changes, and
adds Gaussian noise with standard deviation `noise_multiplier` times the clip. Two data sets are neighbours if one has
one client more. `dp-accounting` computes the distribution of the privacy loss of a round and composes it over the
rounds by FFT (Koskela, Jälkö, Honkela, AISTATS 2020), discretised so that ε is never too small (Doroshenko et al.,
PoPETs 2022).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from fedlalr.common.option_types import Count, Positive, Share, check_type

SMALLEST_DELTA = 1e-10
"""Below it, rounding errors of the FFT would matter."""
STEPS_PER_DEVIATION = 30
"""Grid points in one standard deviation of a round's privacy loss. A grid of step h adds at most h²/4 to the variance
of a round's loss, here 0.03 %, and raises ε by about 0.01 %."""
MOST_STEPS = 100_000
"""Grid points up to a round's largest privacy loss. They limit time and memory at rates below about 1e-3, and then
raise ε: at a rate of 1e-4 by 0.1 %."""
TAIL = 10
"""Standard deviations of the noise that matter; the rest, 1e-22 of the mass, counts as a full loss of privacy."""


class Spent(NamedTuple):
    """Rounds on the same clients with the same noise and rate."""

    noise_multiplier: float
    rate: float
    rounds: int


def epsilon(noise_multiplier: float, rate: float, rounds: int, delta: float) -> float:
    """ε of a run with these settings. It depends on the number of rounds alone, so a resumed run continues exactly.

    A call takes 5 to 30 ms at rates from 1 to 0.01, and up to 0.5 s at smaller ones; a repeated call takes nothing.
    """
    return composed_epsilon([Spent(noise_multiplier, rate, rounds)], delta)


def composed_epsilon(spent: Sequence[Spent], delta: float) -> float:
    """ε of several runs on the same clients together."""
    check_delta(delta)
    for run in spent:
        check_type("noise_multiplier", run.noise_multiplier, Positive)
        check_type("rate", run.rate, Share)
        if run.rounds != 0:
            check_type("rounds", run.rounds, Count, ", or 0")
    return _composed_epsilon(tuple(run for run in spent if run.rounds), delta)


@lru_cache(maxsize=4096)
def _composed_epsilon(spent: tuple[Spent, ...], delta: float) -> float:
    if not spent:
        return 0.0
    grid = min(_grid(run.noise_multiplier, run.rate) for run in spent)
    try:
        first, *others = (_one_round(run.noise_multiplier, run.rate, grid).self_compose(run.rounds) for run in spent)
    except OverflowError as error:
        least = min(run.noise_multiplier for run in spent)
        raise ValueError(
            f"ε cannot be computed with a noise multiplier of {least:g}: it hides nothing; use at least 0.01, or leave "
            f"out delta to try clipping alone"
        ) from error
    for other in others:
        first = first.compose(other)
    return float(first.get_epsilon_for_delta(delta))


def solve_noise_multiplier(epsilon: float, rate: float, rounds: int, delta: float) -> float:
    """The smallest noise multiplier, to three decimals, with which a run spends at most this ε."""
    check_type("epsilon", epsilon, Positive)
    check_type("rounds", rounds, Count)

    def is_enough(thousandths: int) -> bool:
        return composed_epsilon([Spent(thousandths / 1000, rate, rounds)], delta) <= epsilon

    enough = 1000
    while not is_enough(enough):
        enough *= 2
    least = enough // 2 + 1 if enough > 1000 else 1
    return (least + bisect_left(range(least, enough), True, key=is_enough)) / 1000


def check_delta(delta: float) -> None:
    """Reject a δ that is no probability, or too small to compute with."""
    check_type("delta", delta, Positive)
    if not SMALLEST_DELTA <= delta < 1:
        raise ValueError(
            f"delta must be at least {SMALLEST_DELTA:g} and below 1, not {delta!r}; use less than 1 / number of clients"
        )


def _grid(noise_multiplier: float, rate: float) -> float:
    """The distance of two grid points of the privacy loss: small beside the loss of a round."""
    deviation = 1 / noise_multiplier
    if rate < 1 and deviation < 25:  # beyond, the exponential would overflow
        deviation = min(deviation, rate * math.sqrt(math.expm1(deviation**2)))
    unsampled = 1 / (2 * noise_multiplier**2) + TAIL / noise_multiplier
    largest = math.log1p(rate * math.expm1(unsampled)) if unsampled < 700 else unsampled + math.log(rate)
    return max(deviation / STEPS_PER_DEVIATION, largest / MOST_STEPS)


@lru_cache(maxsize=16)
def _one_round(noise_multiplier: float, rate: float, grid: float) -> Any:
    """The distribution of the privacy loss of one round."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise ImportError("privacy accounting needs dp-accounting: pip install 'fedlalr[privacy]'") from error
    return privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=rate, value_discretization_interval=grid
    )
