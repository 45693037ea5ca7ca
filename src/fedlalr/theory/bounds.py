"""The right-hand sides of the theorems, term by term, as the paper prints them.

All of them bound the same thing: the mean of ‖∇f(x̄)‖² over all local steps, at the average x̄ of the clients' iterates.
None of them is a guarantee: the paper's statements and proofs differ in places; `docs/theory.md` lists where.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from fedlalr.common.checks import check_choice
from fedlalr.theory import checks
from fedlalr.theory.problem import Constants, Problem, constants
from fedlalr.theory.step_sizes import StepSize, cap, largest_smoothness, smaller


@dataclass(frozen=True)
class Term:
    """One term: a constant of the problem times a factor made of α, N, K and T."""

    name: str
    coefficient: float
    factor: float

    @property
    def value(self) -> float:
        return self.coefficient * self.factor


@dataclass(frozen=True)
class Bound:
    """A bound as a sum of named terms.

    `form` is "statement" (as in the theorem), "proof" (as its proof ends) or "constants" (with α = √(N/(KT))).
    `remarks` name the assumptions that the given numbers violate: a step size above the cap, a point out of the regime.
    """

    source: str
    form: str
    step: StepSize
    terms: tuple[Term, ...]
    remarks: tuple[str, ...]
    trivial: float
    """d·G∞², which ‖∇f‖² never exceeds."""

    @property
    def is_vacuous(self) -> bool:
        """Whether it says nothing that the bound on every coordinate of a gradient does not say."""
        return not self.total < self.trivial

    @property
    def total(self) -> float:
        return math.fsum(term.value for term in self.terms)

    @property
    def dominant(self) -> Term:
        """The largest term; the first of equal ones."""
        return max(self.terms, key=lambda term: term.value)

    def __getitem__(self, name: str) -> float:
        for term in self.terms:
            if term.name == name:
                return term.value
        raise KeyError(f"{self.source} has no term {name!r}, only {', '.join(term.name for term in self.terms)}")


def theorem1(
    problem: Problem,
    *,
    N: int,
    K: int,
    T: int,
    alpha: float | None = None,
    form: Literal["statement", "proof"] = "statement",
) -> Bound:
    """Theorem 1: K local steps in every round. Without `alpha`, the step size of Corollary 1.

    The statement has 1/T and αN/T where the last line of the proof has 1/(KT) and αN/(KT).
    """
    check_choice("form", form, ("statement", "proof"))
    return _bound("Theorem 1", form, problem, _equal_rounds(N, K, T), alpha)


def corollary1(problem: Problem, *, N: int, K: int, T: int) -> Bound:
    """Corollary 1: C1/√(NKT) + C2 N/(KT) + C3/(KT) + C4 (N/(KT))^1.5, which needs α = √(N/(KT)) below the cap."""
    return _bound("Corollary 1", "constants", problem, _equal_rounds(N, K, T))


def corollary2(
    problem: Problem,
    *,
    N: int,
    K: int,
    T: int,
    alpha: float | None = None,
    form: Literal["proof", "constants"] = "proof",
) -> Bound:
    """Corollary 2, momentum restarted in every round: the proof of Theorem 1 without the K² part of its α² term."""
    check_choice("form", form, ("proof", "constants"))
    return _bound("Corollary 2", form, problem, _equal_rounds(N, K, T), alpha, restart=True)


def theorem2(
    problem: Problem,
    *,
    N: int,
    intervals: Sequence[int] | np.ndarray,
    alpha: float | None = None,
    form: Literal["proof", "constants"] = "proof",
) -> Bound:
    """Theorem 2: K_0 ≤ K_1 ≤ … ≤ K_{T−1} local steps. The theorem states an order; this is the last line of its proof.

    "proof" computes from α and K_{T−1}; "constants" from C1, C2,1 … C4,2, which assume that the cap on α does not bind.
    """
    check_choice("form", form, ("proof", "constants"))
    K = checks.intervals(intervals)
    run = _Run(checks.count("N", N), int(K[-1]), len(K), int(K.sum()), "ΣK")
    bound = _bound("Theorem 2", form, problem, run, alpha)
    return replace(bound, remarks=(*_growth_remarks(K), *bound.remarks))


def rounds_to_speedup(
    problem: Problem, *, N: int, K: int | None = None, growing: tuple[int, float] | None = None, restart: bool = False
) -> float:
    """The T from which C1/√(NKT) is the largest of Corollary 1's four terms (of Corollary 2's with `restart`).

    For large N the term N/(KT) decides: it requires KT ≥ N³ (C2/C1)². With `growing` = (start, base) the intervals are
    K_t = start + ⌊log_base t⌋, and the terms are those of Theorem 2: the paper says that the first one dominates in the
    end, and this is when.
    """
    N = checks.count("N", N)
    parts = constants(problem, restart=restart)
    if parts.C1 == 0:
        raise ValueError("with gap = 0 and sigma = 0 the first term is 0 and never the largest; set one above 0")
    if (K is None) == (growing is None):
        raise ValueError(f"give either K or growing = (start, base), not K = {K} and growing = {growing}")
    if growing is not None:
        return _rounds_to_dominance(parts, N, *growing)
    assert K is not None  # checked above
    return _steps_to_dominance(parts, N, checks.count("K", K)) / K


def _steps_to_dominance(parts: Constants, N: int, K: int) -> float:
    """The sum of all intervals from which on the first term is the largest, if the last interval is K."""
    second, third, fourth = (constant / parts.C1 for constant in (parts.C2(K), parts.C3(K), parts.C4(K)))
    n = float(N)  # products of floats become infinite where whole numbers would not fit
    return max(n * n * n * second * second, n * third * third, n * n * fourth)


def _rounds_to_dominance(parts: Constants, N: int, start: int, base: float) -> float:
    """Go through the stages of rounds with the same interval, until no later stage can need more steps than it has.

    From one stage to the next the steps needed grow by at most (1 + 1/K)⁸, since C2 has degree 4 in K and is squared,
    and the steps done grow by at least base − 1/baseʲ, where baseʲ is the first round of the stage.
    """
    checks.growth(start, base)
    K, first, power, done, answer = start, 1.0, 1.0, 0.0, 1.0
    while True:
        needed = _steps_to_dominance(parts, N, K)
        if done >= needed and base - 1 / power >= (1 + 1 / K) ** 8:
            return answer
        power *= base
        if not math.isfinite(power) or not math.isfinite(needed):
            raise ValueError("the number of rounds exceeds double precision; give a smaller N or a larger eps")
        following = math.ceil(power)
        if done + K < needed:  # not yet in the first round of the stage
            answer = min(first - 1 + (needed - done) / K, float(following))
        done, first, K = done + K * (following - first), float(following), K + 1


class _Run(NamedTuple):
    """The run as the formulas see it. K is the last and largest interval; `name` is the symbol of the sum of all."""

    N: int
    K: int
    T: int
    steps: int
    name: str

    @property
    def below(self) -> str:
        """The symbol as a denominator."""
        return f"({self.name})" if self.name == "KT" else self.name


def _equal_rounds(N: int, K: int, T: int) -> _Run:
    N, K, T = checks.count("N", N), checks.count("K", K), checks.count("T", T)
    return _Run(N, K, T, K * T, "KT")


def _bound(
    source: str, form: str, problem: Problem, run: _Run, alpha: float | None = None, restart: bool = False
) -> Bound:
    step, parts = smaller(run.N, run.steps, cap(eps=problem.eps, L=problem.L)), constants(problem, restart=restart)
    if alpha is not None:
        if form == "constants":
            raise ValueError(f'form="constants" has α = √(N/{run.below}) built in; leave alpha out or use form="proof"')
        step = StepSize(alpha=checks.positive("alpha", alpha), uncapped=step.uncapped, cap=step.cap)
    terms = _rates(parts, run) if form == "constants" else _terms(parts, step.alpha, run, form)
    bound = Bound(source, form, step, terms, tuple(_remarks(problem, step, run, form)), problem.d * problem.G_inf**2)
    if not bound.is_vacuous:
        return bound
    vacuous = f"‖∇f‖² is never above d·G∞² = {bound.trivial:.3g}: a bound whose sum is no smaller is vacuous."
    return replace(bound, remarks=(*bound.remarks, vacuous))


def _terms(parts: Constants, alpha: float, run: _Run, form: str) -> tuple[Term, ...]:
    """The five terms as functions of α."""
    below, divisor = ("T", run.T) if form == "statement" else (run.below, run.steps)
    return (
        Term("initial gap", parts.gap, 1 / (alpha * run.steps)),
        Term("α²", parts.C2(run.K), alpha * alpha),
        Term(f"1/{below}", parts.C3(run.K), 1 / divisor),
        Term(f"αN/{below}", parts.C4(run.K), alpha * run.N / divisor),
        Term("α/N", parts.noise, alpha / run.N),
    )


def _rates(parts: Constants, run: _Run) -> tuple[Term, ...]:
    """The four terms that α = √(N/(KT)) turns them into."""
    return (
        Term(f"1/√(N{run.name})", parts.C1, 1 / math.sqrt(run.N * run.steps)),
        Term(f"N/{run.below}", parts.C2(run.K), run.N / run.steps),
        Term(f"1/{run.below}", parts.C3(run.K), 1 / run.steps),
        Term(f"(N/{run.below})^1.5", parts.C4(run.K), (run.N / run.steps) ** 1.5),
    )


def _growth_remarks(K: np.ndarray) -> list[str]:
    """Since log T = 2 log √T, intervals a + ⌊c log t⌋ grow by at most twice as much, plus one, up to T as up to √T."""
    root = math.isqrt(len(K) - 1) + 1
    early, late = int(K[root - 1] - K[0]), int(K[-1] - K[0])
    if late <= 2 * early + 1:
        return []
    return [
        f"K_t grows faster than log t, by {early} up to round {root} and by {late} up to round {len(K)}: the theorem"
        " requires K_t = O(log t), without which the first term need not dominate."
    ]


def _remarks(problem: Problem, step: StepSize, run: _Run, form: str) -> list[str]:
    N, name, below = run.N, run.name, run.below
    remarks = []
    if step.alpha > step.cap:
        largest = largest_smoothness(eps=problem.eps, alpha=step.alpha)
        remarks.append(
            f"The theorem requires α ≤ 3ε/(20L) = {step.cap:.3g}, and α is {step.alpha:.3g}: the cap does not hold for"
            f" L > {largest:.3g}, and L is {problem.L:.3g}."
        )
    if step.cap_binds:
        binds = f"√(N/{below}) = {step.uncapped:.3g} is above the cap 3ε/(20L) = {step.cap:.3g}"
        if form == "constants":
            remarks.append(f"{binds}: these constants assume that it is not; use the terms in α instead.")
        else:
            remarks.append(f"{binds}: α cannot take this value, so the rate 1/√(N{name}) does not follow.")
    if run.steps < N**3:
        remarks.append(
            f"{name} = {run.steps} is below N³ = {N**3}: 1/√(N{name}) is smaller than N/{below} even before constants."
        )
    if problem.eps > 1:
        remarks.append(f"ε is {problem.eps:.3g}: the proof turns 1/ε into 1/ε², which needs ε ≤ 1.")
    if problem.eps == problem.G_inf:
        remarks.append("ε = G∞ keeps second moments constant: every client has the same constant rate.")
    return remarks
