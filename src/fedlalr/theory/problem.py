"""The known quantities that the theorems assume of a problem, and the constants built from them, as printed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedlalr.theory import checks

ASSUMPTIONS = (
    "every client's loss is L-smooth",
    "stochastic gradients are unbiased, with variance at most σ², and their noise is independent across clients",
    "every coordinate of every stochastic gradient is at most G∞ in absolute value, and ε ≤ G∞",
    "every client takes part in every round",
    "the step size α is at most 3ε/(20L)",
)
"""The assumptions of the paper's theorems. The functions evaluate formulas; they cannot check the assumptions."""


@dataclass(frozen=True)
class Problem:
    """L, σ, G∞, d and f(Z₁) − f* of a problem, with the ε and β1 of the method.

    Z₁ is the starting point: the paper defines it by an iterate before the first one, which does not exist.
    """

    L: float
    """Lipschitz constant of every client's gradient."""
    sigma: float
    """Square root of the largest variance E‖g − ∇f_i‖² of a stochastic gradient, over the whole vector."""
    G_inf: float
    """Largest absolute value of a coordinate of a stochastic gradient."""
    d: int
    """Number of parameters."""
    gap: float
    """f(x_0) − f*."""
    eps: float
    """ε: second moments start at ε²."""
    beta1: float = 0.9

    def __post_init__(self) -> None:
        # Python's numbers from here on: NumPy's narrow types overflow in the formulas, integers silently.
        for name in ("L", "G_inf", "eps"):
            object.__setattr__(self, name, checks.positive(name, getattr(self, name)))
        for name in ("sigma", "gap", "beta1"):
            object.__setattr__(self, name, checks.not_negative(name, getattr(self, name)))
        object.__setattr__(self, "d", checks.count("d", self.d))
        if self.beta1 >= 1:
            raise ValueError(f"beta1 must lie in [0, 1), not {self.beta1!r}")
        if self.eps > self.G_inf:
            raise ValueError(
                f"eps = {self.eps!r} is above G_inf = {self.G_inf!r}; the theorems need ε ≤ G∞, because second moments"
                " start at ε² and are assumed to stay at or below G∞²"
            )

    @property
    def heterogeneity(self) -> float:
        """σ_G² = 4 d G∞²: the bound on ‖∇f − ∇f_i‖² that bounded gradients imply."""
        return 4 * self.d * self.G_inf**2


@dataclass(frozen=True)
class Constants:
    """The constants of Appendix 3, each including the factor 2G∞. Theorem 1 has the same, with K for K_{T−1}."""

    gap: float
    """2G∞ (f(Z₁) − f*): the first part of C1."""
    noise: float
    """2G∞ · 5Ldσ²/(4ε²): the second part of C1."""
    C2_1: float
    C2_2: float
    C2_3: float
    C3_1: float
    C3_2: float
    C4_1: float
    C4_2: float

    @property
    def C1(self) -> float:  # noqa: N802 - the paper's name
        return self.gap + self.noise

    def C2(self, K: int) -> float:  # noqa: N802
        """C2 of Corollaries 1 and 2, the coefficient of α²."""
        return self.C2_1 + self.C2_2 * K**2 + self.C2_3 * K**4

    def C3(self, K: int) -> float:  # noqa: N802
        """C3, the coefficient of 1/(KT)."""
        return self.C3_1 * K + self.C3_2

    def C4(self, K: int) -> float:  # noqa: N802
        """C4, the coefficient of αN/(KT)."""
        return self.C4_1 + self.C4_2 * K


def constants(problem: Problem, *, restart: bool = False) -> Constants:
    """Evaluate the constants. With `restart`, momentum starts from zero in every round, and C2,2 vanishes."""
    L, G, d, eps, beta1 = problem.L, problem.G_inf, problem.d, problem.eps, problem.beta1
    rest = 1 - beta1
    try:
        room = G**2 - eps**2  # the range of a second moment
        parts = Constants(
            gap=2 * G * problem.gap,
            noise=2 * G * 5 * L * d * problem.sigma**2 / (4 * eps**2),
            C2_1=2 * G * 2 * L**2 * beta1**2 * G**2 * d / (rest**2 * eps**4),
            C2_2=0.0 if restart else 2 * G * L**2 * G**2 / eps**4,
            C2_3=2 * G * L**2 * G**2 / eps**4 * 4 * rest**2 * d,
            C3_1=2 * G * (2 - beta1) * G**2 * d * room / (rest * eps**3),
            C3_2=2 * G * 3 * d * room * G**2 / (2 * eps**3 * rest),
            C4_1=2 * G * 5 * L * G**2 * d * room**2 / (8 * eps**6 * rest**2) * (2 * beta1**2 + rest**2),
            C4_2=2 * G * 5 * L * G**2 * d**2 * room**2 / (2 * eps**6),
        )
    except (OverflowError, ZeroDivisionError):
        parts = None
    if parts is None or not all(map(math.isfinite, vars(parts).values())):
        raise ValueError(f"the constants of {problem} exceed double precision; scale the problem or raise eps")
    return parts
