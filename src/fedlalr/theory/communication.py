"""Rounds, messages and bytes to reach a mean squared gradient norm of δ, by the leading term of the paper's rates.

The paper writes ε for the target; here it is δ, since ε is the floor of the second moments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from fedlalr.common.checks import check_choice
from fedlalr.theory import checks

VECTORS = {"average": 3, "restart": 2}
"""Model-sized vectors a client receives and sends in a round: x, m, v̂, or x and v̂ when momentum is restarted."""


@dataclass(frozen=True)
class Communication:
    """The cost of reaching a target, by the leading term alone: an order of magnitude, not a guarantee."""

    delta: float
    clients: int
    rounds: float
    """Not rounded."""
    bytes_down: int
    """From the server to all clients, over all rounds (rounded up)."""
    bytes_up: int

    @property
    def complexity(self) -> float:
        """The paper's communication complexity: rounds × clients."""
        return self.rounds * self.clients

    @property
    def bytes(self) -> int:
        return self.bytes_down + self.bytes_up


def rounds_fixed(delta: float, *, N: int, K: int, constant: float = 1.0) -> float:
    """T with constant/√(NKT) = δ: constant²/(NKδ²). The paper's remark has constant 1; Corollary 1 has C1.

    >>> rounds_fixed(0.5, N=2, K=4)
    0.5
    """
    return _work(delta, N, constant) / checks.count("K", K)


def rounds_log(delta: float, *, N: int, constant: float = 1.0) -> float:
    """T with constant/√(N T ln T) = δ, for K_t = ln t: x/W(x) with x = constant²/(Nδ²) and Lambert's W."""
    from scipy.special import lambertw  # a slow import, rarely needed

    x = _work(delta, N, constant)
    return x / float(lambertw(x).real)


def rounds_log_summed(delta: float, *, N: int, constant: float = 1.0) -> float:
    """Like `rounds_log`, with the exact sum Σ ln t = ln T! in place of the paper's T ln T.

    The sum is smaller, so this count is larger; the ratio tends to 1 like 1 + 1/ln T as δ → 0.
    """
    from scipy.optimize import brentq
    from scipy.special import gammaln

    x = _work(delta, N, constant)
    log_rounds = brentq(lambda log_t: float(gammaln(math.exp(log_t) + 1)) - x, 0.0, math.log(4 + 4 * x), xtol=1e-13)
    return math.exp(log_rounds)


def rounds_growing(delta: float, *, N: int, start: int, base: float, constant: float = 1.0) -> float:
    """T with constant/√(NΣK_t) = δ for K_t = start + ⌊log_base t⌋, the interval of the paper's experiments.

    >>> rounds_growing(0.1, N=1, start=3, base=4.0)  # 3 rounds of 3, 12 of 4 and 43/5 of 5 local steps
    23.6
    """
    checks.growth(start, base)
    left, steps, first, next_power = _work(delta, N, constant), start, 1.0, float(base)
    while (stage := steps * (math.ceil(next_power) - first)) < left:
        left, steps, first, next_power = left - stage, steps + 1, math.ceil(next_power), next_power * base
    return first - 1 + left / steps


def communication(
    delta: float,
    *,
    N: int,
    params: int,
    K: int | None = None,
    growing: tuple[int, float] | None = None,
    constant: float = 1.0,
    momentum: Literal["average", "restart"] = "average",
    bytes_per_value: int = 4,
) -> Communication:
    """Rounds, complexity and bytes to δ: with K local steps per round, with a `growing` number, or with K_t = ln t.

    `growing` is the start and the base of K_t = start + ⌊log_base t⌋.
    """
    check_choice("momentum", momentum, tuple(VECTORS))
    N, params = checks.count("N", N), checks.count("params", params)
    bytes_per_value = checks.count("bytes_per_value", bytes_per_value)
    if growing is not None and (not isinstance(growing, tuple) or len(growing) != 2):
        raise ValueError(f"growing must be a pair (start, base), such as (3, 4.0), not {growing!r}")
    if K is not None and growing is not None:
        raise ValueError(f"K = {K} and growing = {growing} both set the number of local steps; give one of them")
    if K is not None:
        rounds = rounds_fixed(delta, N=N, K=K, constant=constant)
    elif growing is not None:
        rounds = rounds_growing(delta, N=N, start=growing[0], base=growing[1], constant=constant)
    else:
        rounds = rounds_log(delta, N=N, constant=constant)
    one_way = math.ceil(rounds) * N * VECTORS[momentum] * params * bytes_per_value
    return Communication(delta=delta, clients=N, rounds=rounds, bytes_down=one_way, bytes_up=one_way)


def _work(delta: float, N: int, constant: float) -> float:
    """constant²/(Nδ²): the number of local steps per client."""
    ratio = checks.positive("constant", constant) / checks.positive("delta", delta)
    x = ratio * ratio / checks.count("N", N)
    if not math.isfinite(4 * x) or x == 0:
        raise ValueError(f"constant²/(Nδ²) exceeds double precision for delta = {delta!r} and constant = {constant!r}")
    return x
