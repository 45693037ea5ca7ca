import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr.theory import (
    Problem,
    communication,
    constants,
    corollary1,
    corollary2,
    log_intervals,
    rounds_to_speedup,
    theorem1,
    theorem2,
)

PLAIN = Problem(L=2, sigma=3, G_inf=2, d=5, gap=7, eps=1, beta1=0.5)
RUN = {"N": 4, "K": 3, "T": 100}

problems = st.builds(
    Problem,
    L=st.floats(0.1, 10),
    sigma=st.floats(0.1, 10),
    G_inf=st.floats(1, 10),
    d=st.integers(1, 1000),
    gap=st.floats(0.1, 10),
    eps=st.floats(0.01, 1),
    beta1=st.floats(0, 0.99),
)
runs = st.fixed_dictionaries({"N": st.integers(1, 200), "K": st.integers(1, 50), "T": st.integers(1, 10**6)})
quick = settings(deadline=None, max_examples=60)


def values(bound):
    return {term.name: term.value for term in bound.terms}


def test_statement_of_theorem_1_equals_the_values_worked_out_by_hand():
    bound = theorem1(PLAIN, **RUN, alpha=0.01)
    expected = {"initial gap": 28 / 3, "α²": 2.7136, "1/T": 28.8, "αN/T": 22.68, "α/N": 1.125}
    assert values(bound) == pytest.approx(expected, rel=1e-13)
    assert bound.total == pytest.approx(sum(expected.values()))
    assert (bound.dominant.name, bound["α/N"]) == ("1/T", pytest.approx(1.125))


def test_proof_of_theorem_1_divides_two_terms_by_k():
    bound = theorem1(PLAIN, **RUN, alpha=0.01, form="proof")
    expected = {"initial gap": 28 / 3, "α²": 2.7136, "1/(KT)": 9.6, "αN/(KT)": 7.56, "α/N": 1.125}
    assert values(bound) == pytest.approx(expected, rel=1e-13)


def test_restart_takes_the_k_squared_part_out_of_the_alpha_squared_term():
    bound = corollary2(PLAIN, **RUN, alpha=0.01)
    expected = {"initial gap": 28 / 3, "α²": 2.656, "1/(KT)": 9.6, "αN/(KT)": 7.56, "α/N": 1.125}
    assert values(bound) == pytest.approx(expected, rel=1e-13)


def test_corollary_1_equals_the_values_worked_out_by_hand():
    bound = corollary1(PLAIN, N=4, K=3, T=1200)
    expected = {"1/√(NKT)": 478 / 120, "N/(KT)": 27136 / 900, "1/(KT)": 0.8, "(N/(KT))^1.5": 56700 / 27000}
    assert values(bound) == pytest.approx(expected, rel=1e-13)


def test_theorem_2_equals_the_values_worked_out_by_hand():
    bound = theorem2(PLAIN, N=2, intervals=[1, 1, 2, 2, 2], alpha=0.05)  # ΣK = 8, last 2
    expected = {
        "initial gap": 28 / 0.4,
        "α²": (640 + 64 * 4 + 320 * 16) * 0.0025,
        "1/ΣK": (720 * 2 + 720) / 8,
        "αN/ΣK": (2700 + 18000 * 2) * 0.1 / 8,
        "α/N": 450 * 0.025,
    }
    assert values(bound) == pytest.approx(expected, rel=1e-13)
    assert set(values(theorem2(PLAIN, N=2, intervals=[1, 1, 2], form="constants"))) == {
        "1/√(NΣK)",
        "N/ΣK",
        "1/ΣK",
        "(N/ΣK)^1.5",
    }


@given(problems, runs)
@quick
def test_statement_is_never_below_the_proof_and_equal_for_one_local_step(problem, run):
    statement, proof = (theorem1(problem, **run, form=form).total for form in ("statement", "proof"))
    assert statement >= proof * (1 - 1e-12)
    one = {**run, "K": 1}
    assert theorem1(problem, **one).total == pytest.approx(theorem1(problem, **one, form="proof").total)


@given(problems, runs)
@quick
def test_restart_never_raises_the_bound(problem, run):
    assert corollary2(problem, **run).total <= theorem1(problem, **run, form="proof").total * (1 + 1e-12)


@given(problems, st.integers(1, 50), st.integers(1, 20), st.integers(1, 300))
@quick
def test_theorem_2_with_equal_intervals_is_the_proof_of_theorem_1(problem, N, K, T):
    assert theorem2(problem, N=N, intervals=[K] * T).total == pytest.approx(
        theorem1(problem, N=N, K=K, T=T, form="proof").total
    )


@given(problems, st.integers(1, 8), st.integers(1, 10))
@quick
def test_constants_and_terms_in_alpha_agree_where_the_cap_is_loose(problem, N, K):
    T = math.ceil(N / K * (20 * problem.L / (3 * problem.eps)) ** 2) + 1
    assert not corollary1(problem, N=N, K=K, T=T).step.cap_binds
    proved = theorem1(problem, N=N, K=K, T=T, form="proof")
    assert corollary1(problem, N=N, K=K, T=T).total == pytest.approx(proved.total)
    restarted = corollary2(problem, N=N, K=K, T=T)
    assert corollary2(problem, N=N, K=K, T=T, form="constants").total == pytest.approx(restarted.total)


def transcribed(problem, N, start, base, rounds):
    """The four terms of the last formula of Appendix 3 for T = 1 … rounds, written from the paper, in float64."""
    L, s, G, d, e, b = problem.L, problem.sigma, problem.G_inf, problem.d, problem.eps, problem.beta1
    t = np.arange(1, rounds + 1)
    K = np.array([start + next(k for k in range(60) if base ** (k + 1) > one) for one in t], dtype=float)
    S, V = K.cumsum(), G**2 - e**2
    C1 = 2 * G * (problem.gap + 5 * L * d * s**2 / (4 * e**2))
    C21, C22 = 2 * G * 2 * L**2 * b**2 * G**2 * d / ((1 - b) ** 2 * e**4), 2 * G * L**2 * G**2 / e**4
    C31, C32 = 2 * G * (2 - b) * G**2 * d * V / ((1 - b) * e**3), 2 * G * 3 * d * V * G**2 / (2 * e**3 * (1 - b))
    C41 = 2 * G * 5 * L * G**2 * d * V**2 / (8 * e**6 * (1 - b) ** 2) * (2 * b**2 + (1 - b) ** 2)
    C42 = 2 * G * 5 * L * G**2 * d**2 * V**2 / (2 * e**6)
    C2 = C21 + C22 * K**2 + C22 * 4 * (1 - b) ** 2 * d * K**4
    return np.array([C1 / np.sqrt(N * S), C2 * N / S, (C31 * K + C32) / S, (C41 + C42 * K) * (N / S) ** 1.5])


@pytest.mark.parametrize(("start", "base", "sigma"), [(3, 4.0, 20.0), (4, 2.0, 3.0), (1, 1.5, 20.0), (2, 10.0, 3.0)])
def test_the_first_term_dominates_from_that_round_on_with_growing_intervals(start, base, sigma):
    problem = replace(PLAIN, L=0.02, sigma=sigma, beta1=0.1, gap=1000)
    rounds = 20_000
    terms = transcribed(problem, 2, start, base, rounds)
    bounded = theorem2(problem, N=2, intervals=log_intervals(rounds, start=start, base=base), form="constants")
    assert [term.value for term in bounded.terms] == pytest.approx(terms[:, -1].tolist(), rel=1e-12)
    smaller = np.flatnonzero(terms[0] < terms[1:].max(axis=0)) + 1
    found = rounds_to_speedup(problem, N=2, growing=(start, base))
    last = smaller[-1] if len(smaller) else 0
    assert last < rounds - 1  # the transcription sees the end of it
    assert last <= found <= last + 1


def test_dominance_with_growing_intervals_rejects_what_it_cannot_answer():
    with pytest.raises(ValueError, match="give either K or growing"):
        rounds_to_speedup(PLAIN, N=2)
    with pytest.raises(ValueError, match="give either K or growing"):
        rounds_to_speedup(PLAIN, N=2, K=3, growing=(3, 4.0))
    with pytest.raises(ValueError, match="exceeds double precision"):
        rounds_to_speedup(PLAIN, N=10**110, growing=(3, 4.0))


@pytest.mark.parametrize(
    ("intervals", "faster"),
    [
        ([7] * 100, False),
        (log_intervals(1000, start=3, base=1.1), False),
        ([1 + int(9 * math.log(t)) for t in range(1, 500)], False),
        (list(range(1, 30)), True),
        ([1 + int(t**0.5) for t in range(1, 300)], True),
        ([1], False),
    ],
)
def test_intervals_that_grow_faster_than_the_logarithm_get_a_remark(intervals, faster):
    remarks = theorem2(PLAIN, N=2, intervals=intervals).remarks
    assert any("grows faster than log t" in remark for remark in remarks) is faster


def test_constants_of_theorem_2_agree_with_its_terms_in_alpha():
    intervals = log_intervals(4000, start=3, base=4.0)
    in_alpha, rates = (theorem2(PLAIN, N=4, intervals=intervals, form=form) for form in ("proof", "constants"))
    assert not in_alpha.step.cap_binds
    assert rates.total == pytest.approx(in_alpha.total)


@pytest.mark.parametrize("form", ["statement", "proof"])
@pytest.mark.parametrize("N", [1, 8, 64])
def test_every_bound_is_c1_over_root_nkt_in_the_limit(form, N):
    limit = constants(PLAIN).C1
    T = 10**24
    assert theorem1(PLAIN, N=N, K=5, T=T, form=form).total * math.sqrt(N * 5 * T) == pytest.approx(limit, rel=1e-3)
    assert corollary1(PLAIN, N=N, K=5, T=T).dominant.name == "1/√(NKT)"


def test_bound_of_theorem_2_approaches_its_leading_term_with_a_logarithmic_interval():
    ratios = []
    for rounds in (10**3, 10**5, 10**7):
        bound = theorem2(PLAIN, N=2, intervals=log_intervals(rounds, start=1, base=4.0), form="constants")
        ratios.append(bound.total / bound["1/√(NΣK)"])
    assert ratios[0] > ratios[1] > ratios[2] > 1


@given(problems, runs, st.integers(2, 10))
@quick
def test_more_rounds_never_raise_the_bound(problem, run, times):
    longer = {**run, "T": run["T"] * times}
    for bound in (theorem1, corollary1, corollary2):
        assert bound(problem, **longer).total <= bound(problem, **run).total * (1 + 1e-12)


@given(problems, runs, st.integers(2, 10))
@quick
def test_more_clients_lower_the_first_term_of_corollary_1_and_raise_the_second(problem, run, times):
    few, many = (values(corollary1(problem, **{**run, "N": N})) for N in (run["N"], run["N"] * times))
    assert many["1/√(NKT)"] == pytest.approx(few["1/√(NKT)"] / math.sqrt(times))
    assert many["N/(KT)"] == pytest.approx(few["N/(KT)"] * times)


@given(problems, st.integers(1, 100), st.integers(1, 20))
@quick
def test_the_first_term_is_the_largest_from_rounds_to_speedup_on(problem, N, K):
    T = rounds_to_speedup(problem, N=N, K=K)
    after = math.ceil(T * 1.01) + 1
    assert corollary1(problem, N=N, K=K, T=after).dominant.name == "1/√(NKT)"
    if T > 10:
        assert corollary1(problem, N=N, K=K, T=math.floor(T * 0.99)).dominant.name != "1/√(NKT)"


def test_a_step_size_above_the_cap_is_remarked_with_the_smoothness_it_would_need():
    problem = replace(PLAIN, eps=1e-8)
    bound = theorem1(problem, N=50, K=50, T=10**9, alpha=2e-3)
    assert any("L > 7.5e-07" in remark for remark in bound.remarks)


def test_a_binding_cap_is_remarked_and_sends_readers_of_constants_elsewhere():
    assert any("does not follow" in remark for remark in theorem1(PLAIN, N=1, K=1, T=10).remarks)
    for bound in (
        corollary1(PLAIN, N=1, K=1, T=10),
        corollary2(PLAIN, N=1, K=1, T=10, form="constants"),
        theorem2(PLAIN, N=1, intervals=[1] * 10, form="constants"),
    ):
        assert any("use the terms in α" in remark for remark in bound.remarks)


def test_a_regime_too_short_for_its_clients_is_remarked():
    assert any("below N³ = 1000" in remark for remark in theorem1(PLAIN, N=10, K=9, T=111).remarks)
    assert not any("below N³" in remark for remark in theorem1(PLAIN, N=10, K=10, T=100).remarks)


def test_extreme_values_of_eps_are_remarked():
    assert any("ε ≤ 1" in remark for remark in theorem1(replace(PLAIN, eps=1.5), **RUN).remarks)
    assert any("constant rate" in remark for remark in theorem1(replace(PLAIN, eps=2), **RUN).remarks)


def test_a_bound_no_smaller_than_any_gradient_is_called_vacuous():
    """At a million rounds the sum is about 0.2; five coordinates of at most G∞ make 5·G∞² of any gradient."""
    long = {"N": 4, "K": 3, "T": 10**6}
    bound = theorem1(PLAIN, **long)
    assert bound.trivial == 5 * 2**2
    assert bound.total < bound.trivial
    assert not bound.is_vacuous
    assert not [remark for remark in bound.remarks if "vacuous" in remark]
    short = theorem1(PLAIN, **RUN, alpha=0.01)
    assert short.total > 20
    assert short.is_vacuous
    assert short.remarks[-1] == "‖∇f‖² is never above d·G∞² = 20: a bound whose sum is no smaller is vacuous."


def test_a_run_within_all_conditions_has_no_remarks():
    assert theorem1(PLAIN, N=4, K=3, T=10**6).remarks == ()


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: theorem1(PLAIN, **RUN, form="appendix"), "form"),
        (lambda: corollary2(PLAIN, **RUN, form="statement"), "form"),
        (lambda: theorem1(PLAIN, **RUN, alpha=0.0), "alpha"),
        (lambda: theorem1(PLAIN, N=0, K=1, T=1), "N"),
        (lambda: corollary2(PLAIN, **RUN, alpha=0.1, form="constants"), "built in"),
        (lambda: theorem2(PLAIN, N=1, intervals=[4, 3]), "not decrease"),
        (lambda: rounds_to_speedup(replace(PLAIN, gap=0, sigma=0), N=1, K=1), "first term"),
    ],
)
def test_wrong_requests_are_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def test_asking_for_a_term_that_is_not_there_names_those_that_are():
    with pytest.raises(KeyError, match="initial gap"):
        theorem1(PLAIN, **RUN)["noise"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("whole", [np.int32, np.int64])
def test_narrow_numbers_of_numpy_do_not_overflow_in_the_formulas(whole):
    """600,000² and 2,000³ do not fit into 32 bits, and (1e-7)⁶ not into a float32."""
    wide = replace(PLAIN, d=600_000, eps=0.25)
    narrow = replace(PLAIN, d=whole(600_000), eps=np.float32(0.25))
    assert constants(narrow) == constants(wide)
    assert math.isfinite(constants(replace(PLAIN, eps=np.float32(1e-7))).C4_2)
    run, same = {"N": 2_000, "K": 300}, {"N": whole(2_000), "K": whole(300)}
    assert rounds_to_speedup(narrow, **same) == rounds_to_speedup(wide, **run)
    assert theorem1(narrow, **same, T=whole(10**8)) == theorem1(wide, **run, T=10**8)
    assert theorem2(narrow, N=same["N"], intervals=[1, 2]) == theorem2(wide, N=run["N"], intervals=[1, 2])
    assert communication(0.01, **same, params=narrow.d) == communication(0.01, **run, params=wide.d)


def test_numbers_beyond_double_precision_are_told_or_infinite_but_raise_nothing_of_pythons_own():
    with pytest.raises(ValueError, match="exceed double precision"):
        theorem1(replace(PLAIN, G_inf=1e200), **RUN)
    assert theorem1(PLAIN, **RUN, alpha=1e200).total == math.inf
    assert rounds_to_speedup(replace(PLAIN, gap=1e-200, sigma=0.0), N=4, K=3) == math.inf
