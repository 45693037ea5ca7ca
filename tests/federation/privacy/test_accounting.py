"""ε against a second accountant, against closed forms and against published values."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from federation.privacy.fourier import Rounds, fourier_epsilon, moments_epsilon, one_round_epsilon
from fedlalr.federation.privacy.accounting import Spent, composed_epsilon, epsilon, solve_noise_multiplier

FOURIER = 1e-6
"""Relative error of the second accountant. Rounding changes φ^n by about n · 1e-16, which is 3e-6 of the smallest δ of
1e-7 if n is 3000; ε changes by less than a tenth of that. Twice the nodes change it by less than 1e-7."""
GRID = 5e-4
"""How far the grid of dp-accounting may raise ε, relatively. A grid of step h = s/30 adds at most h²/4 to the variance
s² of a round's loss: 2.8e-4. ε is a mean, proportional to s², plus some standard deviations, proportional to s. The
rest is for the tails, where a loss is not normal."""


def random_settings(count: int) -> list[tuple[float, float, int, float]]:
    """Noise multiplier, rate, rounds and δ, with ε between 0.5 and 21."""
    generator = np.random.default_rng(24)
    found: list[tuple[float, float, int, float]] = []
    while len(found) < count:
        noise, rate = generator.uniform(0.5, 4), 10 ** generator.uniform(-2, 0)
        rounds, delta = int(10 ** generator.uniform(1, 3.4)), 10 ** generator.uniform(-7, -3)
        spread = math.sqrt(rounds) * min(1 / noise, rate * math.sqrt(math.expm1(1 / noise**2)))  # about ε / 4
        if 0.1 < spread < 4:
            found.append((round(noise, 3), round(rate, 4), rounds, float(f"{delta:.2g}")))
    return found


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.slow) for batch in (1, 2, 3, 4))])
def test_epsilon_agrees_with_the_second_accountant(batch: int) -> None:
    for noise, rate, rounds, delta in random_settings(50)[batch::5]:
        exact = fourier_epsilon([Rounds(noise, rate, rounds)], delta)
        ours = epsilon(noise, rate, rounds, delta)
        assert exact * (1 - FOURIER) <= ours <= exact * (1 + GRID), (noise, rate, rounds, delta)


def test_the_second_accountant_converged_and_agrees_with_closed_forms() -> None:
    for setting in random_settings(50)[:3]:
        runs, delta = [Rounds(*setting[:3])], setting[3]
        assert fourier_epsilon(runs, delta, nodes=8000) == pytest.approx(fourier_epsilon(runs, delta), rel=FOURIER / 10)
    for noise, rounds, delta in [(1.0, 1, 1e-5), (4.0, 50, 1e-6)]:
        gaussian = gaussian_epsilon(math.sqrt(rounds) / noise, delta)
        assert fourier_epsilon([Rounds(noise, 1.0, rounds)], delta) == pytest.approx(gaussian, rel=FOURIER)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of one Gaussian mechanism with sensitivity over noise μ (Balle and Wang, ICML 2018, theorem 8)."""

    def excess(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))) - delta

    return float(brentq(excess, 0, 10 * mu**2 + 50 * mu))


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(1.0, 1, 1e-10), (10.0, 100, 1e-10), (0.1, 5, 1e-6)])
def test_without_sampling_epsilon_is_that_of_one_gaussian_mechanism(noise: float, rounds: int, delta: float) -> None:
    exact = gaussian_epsilon(math.sqrt(rounds) / noise, delta)
    assert exact <= epsilon(noise, 1.0, rounds, delta) <= exact * (1 + GRID)


@pytest.mark.parametrize(("noise", "rate", "delta"), [(1.0, 0.1, 1e-3), (0.5, 0.5, 1e-5), (2.0, 0.9, 1e-4)])
def test_a_single_round_agrees_with_its_closed_form(noise: float, rate: float, delta: float) -> None:
    exact = one_round_epsilon(noise, rate, delta)
    assert exact <= epsilon(noise, rate, 1, delta) <= exact * (1 + GRID)


def test_noise_too_small_for_the_accountant_is_rejected_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"a noise multiplier of 1e-09: .* leave out delta"):
        epsilon(1e-9, 0.1, 10, 1e-3)


def test_small_rates_stay_on_the_safe_side() -> None:
    exact = fourier_epsilon([Rounds(1.0, 1e-4, 10_000)], 1e-6)
    assert exact * (1 - FOURIER) <= epsilon(1.0, 1e-4, 10_000, 1e-6) <= exact * 1.002  # the grid is limited


def test_epsilon_agrees_with_the_published_value_of_a_numerical_accountant() -> None:
    """Opacus, opacus/tests/accountants_test.py, test_prv_accountant, with the accountant of Gopi, Lee and Wutschitz
    (NeurIPS 2021): an upper bound with an allowed error of 0.01, so the true value is 0 to 0.02 lower."""
    published = 6.777395712150674
    assert published - 0.02 <= epsilon(1.5, 0.04, 2249, 1e-5) <= published


@pytest.mark.parametrize(
    ("noise", "rate", "rounds", "published", "digits", "conversion"),
    [
        pytest.param(4.0, 0.01, 10_000, 1.26, 2, "classic", id="Abadi et al. 2016, figure 2"),
        pytest.param(1.12, 256 / 60_000, 14_062, 2.92, 2, "classic", id="TensorFlow Privacy, tutorials/README.md"),
        pytest.param(1.5, 0.04, 2250, 7.32911117143, 8, "tight", id="Opacus, accountants_test.py, RDP"),
    ],
)
def test_epsilon_is_below_published_bounds_by_moments(
    noise: float, rate: float, rounds: int, published: float, digits: int, conversion: str
) -> None:
    """Such bounds are not tight. The second accountant repeats them to their digits, so the settings are the same."""
    assert moments_epsilon(noise, rate, rounds, 1e-5, conversion) == pytest.approx(published, abs=0.5 * 10**-digits)
    assert 0.7 * published < epsilon(noise, rate, rounds, 1e-5) < published


def test_the_noise_for_an_epsilon_agrees_with_a_published_value() -> None:
    """Opacus finds 1.34765625 for ε = 8 to 0.01, with an upper bound on ε that is up to 0.02 too high."""
    found = solve_noise_multiplier(8.0, 0.04, 2250, 1e-5)
    slope = (epsilon(1.34, 0.04, 2250, 1e-5) - epsilon(1.35, 0.04, 2250, 1e-5)) / 0.01
    assert found == pytest.approx(1.34765625, abs=0.03 / slope + 0.001)


@pytest.mark.parametrize(("target", "rate", "rounds"), [(8.0, 0.1, 100), (0.5, 0.01, 300), (50.0, 1.0, 3)])
def test_the_smallest_noise_that_keeps_epsilon_is_found(target: float, rate: float, rounds: int) -> None:
    found = solve_noise_multiplier(target, rate, rounds, 1e-5)
    assert epsilon(found, rate, rounds, 1e-5) <= target < epsilon(round(found - 0.001, 3), rate, rounds, 1e-5)
    assert found == round(found, 3)


def test_runs_on_the_same_clients_compose() -> None:
    runs = [(1.0, 0.1, 40), (2.0, 0.5, 10), (0.8, 0.02, 100)]
    exact = fourier_epsilon([Rounds(*run) for run in runs], 1e-5)
    together = composed_epsilon([Spent(*run) for run in runs], 1e-5)
    assert exact <= together <= exact * (1 + GRID)
    assert together < sum(epsilon(*run, 1e-5) for run in runs)
    halves = composed_epsilon([Spent(1.0, 0.1, 30), Spent(1.0, 0.1, 70)], 1e-5)
    assert halves == pytest.approx(epsilon(1.0, 0.1, 100, 1e-5), rel=1e-9)


def test_epsilon_grows_with_every_round() -> None:
    spent = [epsilon(0.8, 0.1, rounds, 1e-5) for rounds in range(6)]
    assert spent[0] == 0.0
    assert spent == sorted(set(spent))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 0.1, 10, 1e-5), "noise_multiplier must be a finite number above 0, not 0.0"),
        ((1.0, 0.0, 10, 1e-5), r"rate must lie in \(0, 1\], not 0.0"),
        ((1.0, 0.1, -1, 1e-5), "rounds must be a whole number of at least 1, or 0, not -1"),
        ((1.0, 0.1, 10, 1.0), "delta must be at least 1e-10 and below 1, not 1.0"),
        ((1.0, 0.1, 10, 1e-11), "delta must be at least 1e-10 and below 1, not 1e-11"),
    ],
)
def test_impossible_settings_are_rejected(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epsilon(*arguments)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    with pytest.raises(ImportError, match=r"needs dp-accounting: pip install 'fedlalr\[privacy\]'"):
        epsilon(1.2345, 0.1, 10, 1e-5)
