"""A second accountant, which shares nothing with the first: quadrature for the characteristic function of a round's
privacy loss, its power for the composition, and a Fourier series for δ(ε) (compare Zhu, Dong, Wang, AISTATS 2022).

One client more: the output is P = (1 − q) N(0, σ²) + q N(1, σ²) instead of Q = N(0, σ²). The loss of an output x is
L(x) = log P(x)/Q(x) = log(1 − q + q exp((2x − 1) / 2σ²)), and −L(x) if that client is missing instead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import norm

NEGLIGIBLE = 1e-15
"""Probability mass outside the period of the Fourier series, and the modulus of the terms that are left out."""


class Rounds(NamedTuple):
    """The same round several times."""

    noise_multiplier: float
    rate: float
    rounds: int


def fourier_epsilon(runs: list[Rounds], delta: float, nodes: int = 4000) -> float:
    """ε of the composed rounds, the larger one of adding and of removing a client."""
    return max(_epsilon(runs, delta, nodes, sign) for sign in (1, -1))


def one_round_epsilon(noise_multiplier: float, rate: float, delta: float) -> float:
    """ε of a single round in closed form (up to a root): outputs beyond x* favour P more than e^ε times."""

    def excess(epsilon: float) -> float:
        at = noise_multiplier**2 * np.log((np.exp(epsilon) - 1 + rate) / rate) + 0.5
        with_client = (1 - rate) * norm.sf(at / noise_multiplier) + rate * norm.sf((at - 1) / noise_multiplier)
        return float(with_client - np.exp(epsilon) * norm.sf(at / noise_multiplier)) - delta

    return float(brentq(excess, 0, 100, xtol=1e-12)) if excess(0) > 0 else 0.0


def moments_epsilon(noise_multiplier: float, rate: float, rounds: int, delta: float, conversion: str) -> float:
    """The bound on ε by Rényi divergences, "classic" (Mironov, CSF 2017, proposition 3: the moments accountant) or
    "tight" (Canonne, Kamath, Steinke, NeurIPS 2020, proposition 12), the best one of the orders that libraries try."""
    orders = np.concatenate([1 + np.arange(1, 100) / 10, np.arange(11, 64)])
    loss, share = _loss(Rounds(noise_multiplier, rate, rounds), 4000, sign=-1)
    renyi = rounds * np.array([logsumexp(-order * loss, b=share) for order in orders]) / (orders - 1)
    bounds = renyi - np.log(delta) / (orders - 1)
    if conversion == "tight":
        bounds += np.log1p(-1 / orders) - np.log(orders) / (orders - 1)
    return float(bounds.min())


def _epsilon(runs: list[Rounds], delta: float, nodes: int, sign: int) -> float:
    losses = [_loss(run, nodes, sign) for run in runs]
    top = _edge(runs, losses, +1)
    period = 1.05 * (top + _edge(runs, losses, -1))
    terms = _characteristic(runs, losses, period)
    t = 2 * np.pi / period * np.arange(len(terms))

    def excess(epsilon: float) -> float:
        """δ(ε) = E (1 − exp(ε − S))₊, integrated term by term, less the wanted δ."""
        width = top - epsilon
        with np.errstate(invalid="ignore", divide="ignore"):
            weights = (1 - np.exp(-1j * t * width)) / (1j * t) - (1 - np.exp(-(1 + 1j * t) * width)) / (1 + 1j * t)
        weights[0] = width - 1 + np.exp(-width)
        series = terms * weights * np.exp(-1j * t * epsilon)
        return float(series[0].real + 2 * series[1:].real.sum()) / period - delta

    return float(brentq(excess, 0, top, xtol=1e-10)) if excess(0) > 0 else 0.0


def _loss(run: Rounds, nodes: int, sign: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The losses at the nodes of the trapezoidal rule, which is exact here up to rounding, and their probabilities."""
    sigma, q, _ = run
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, nodes)
    loss = np.logaddexp(np.log1p(-q) if q < 1 else -np.inf, np.log(q) + (2 * x - 1) / (2 * sigma**2))
    without = norm.pdf(x, scale=sigma) * (x[1] - x[0])
    return (loss, without * np.exp(loss)) if sign > 0 else (-loss, without)


def _edge(runs: list[Rounds], losses: list[tuple[NDArray[np.float64], NDArray[np.float64]]], sign: int) -> float:
    """A bound that the sum of the losses, or its negative, exceeds with negligible probability (Chernoff)."""
    orders = np.geomspace(0.05, 200, 60)
    bounds = -np.log(NEGLIGIBLE) * np.ones_like(orders)
    for run, (loss, share) in zip(runs, losses, strict=True):
        bounds += run.rounds * np.array([logsumexp(sign * order * loss, b=share) for order in orders])
    return float(np.min(bounds / orders))


def _characteristic(
    runs: list[Rounds], losses: list[tuple[NDArray[np.float64], NDArray[np.float64]]], period: float
) -> NDArray[np.complex128]:
    """E exp(i t S) at t = 2πk / period, k = 0, 1, …, until it is negligible."""
    found: list[NDArray[np.complex128]] = []
    block = 128
    while True:
        t = 2 * np.pi / period * np.arange(len(found) * block, (len(found) + 1) * block)
        value = np.ones(block, dtype=complex)
        for run, (loss, share) in zip(runs, losses, strict=True):
            value *= (np.exp(1j * t[:, None] * loss) @ share) ** run.rounds
        found.append(value)
        if np.abs(value[-8:]).max() < NEGLIGIBLE:
            return np.concatenate(found)
        if len(found) > 400:
            raise AssertionError(f"the characteristic function of {runs} does not vanish")
