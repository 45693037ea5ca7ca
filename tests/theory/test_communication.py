import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr.theory import communication, log_intervals, rounds_fixed, rounds_growing, rounds_log, rounds_log_summed

deltas = st.floats(1e-6, 0.5)
quick = settings(deadline=None, max_examples=60)


def test_rounds_with_a_fixed_interval_equal_the_remark_of_the_paper():
    assert rounds_fixed(0.01, N=10, K=5) == pytest.approx(1 / (10 * 5 * 1e-4))
    assert rounds_fixed(0.01, N=10, K=5, constant=3) == pytest.approx(9 * 200)


@given(deltas, st.integers(1, 100), st.integers(1, 50))
@quick
def test_rounds_solve_the_rate_they_were_derived_from(delta, N, K):
    assert 1 / math.sqrt(N * K * rounds_fixed(delta, N=N, K=K)) == pytest.approx(delta)
    T = rounds_log(delta, N=N)
    assert T * math.log(T) == pytest.approx(1 / (N * delta**2))


def test_lambert_count_equals_a_value_worked_out_by_hand():
    # T = e³ has T ln T = 3e³
    assert rounds_log(1 / math.sqrt(3 * math.e**3), N=1) == pytest.approx(math.e**3)


@given(deltas, st.integers(1, 20))
@quick
def test_summed_count_is_where_the_sum_of_logarithms_reaches_the_work(delta, N):
    T = rounds_log_summed(delta, N=N)
    assert math.lgamma(T + 1) == pytest.approx(1 / (N * delta**2), rel=1e-6)


def test_summed_count_agrees_with_adding_up():
    work, total, T = 5000.0, 0.0, 0
    while total < work:
        T += 1
        total += math.log(T)
    assert T - 1 < rounds_log_summed(1 / math.sqrt(work), N=1) <= T


@given(st.floats(1.0, 3e4), st.integers(1, 9), st.one_of(st.sampled_from([2.0, 4.0, 3.0, 10.0]), st.floats(1.05, 12.0)))
@quick
def test_the_count_of_a_growing_interval_agrees_with_adding_up(work, start, base):
    T = rounds_growing(1 / math.sqrt(work), N=1, start=start, base=base)
    steps = log_intervals(math.ceil(T) + 1, start=start, base=base).cumsum()
    before = steps[math.ceil(T) - 2] if T > 1 else 0
    assert before - 1e-6 * work <= work <= steps[math.ceil(T) - 1] + 1e-6 * work
    assert T - (math.ceil(T) - 1) == pytest.approx(
        (work - before) / (steps[math.ceil(T) - 1] - before), abs=1e-6 * work
    )


def test_the_count_of_a_growing_interval_reaches_the_smallest_targets():
    fewest = rounds_growing(1e-150, N=1, start=3, base=1.01)
    assert 1e290 < fewest < rounds_growing(1e-150, N=1, start=3, base=1e6) < 1e300


def test_a_growing_interval_and_a_fixed_one_are_not_asked_for_together():
    with pytest.raises(ValueError, match="both set the number of local steps"):
        communication(0.1, N=2, K=3, growing=(3, 4.0), params=5)
    with pytest.raises(ValueError, match=r"base must be at least 1.001"):
        communication(0.1, N=2, growing=(3, 1.0), params=5)
    with pytest.raises(ValueError, match="must be a pair"):
        communication(0.1, N=2, growing=3, params=5)
    with pytest.raises(ValueError, match="T must be at most 100,000,000"):
        log_intervals(10**10, start=3, base=2.0)


def test_lambert_count_approaches_the_numerical_solution_as_delta_vanishes():
    ratios = [rounds_log_summed(delta, N=4) / rounds_log(delta, N=4) for delta in (1e-2, 1e-5, 1e-20, 1e-80, 1e-150)]
    assert all(earlier > later > 1 for earlier, later in pairwise(ratios))
    assert ratios[-1] < 1.002
    for delta, ratio in zip((1e-20, 1e-150), (ratios[2], ratios[4]), strict=True):
        assert ratio == pytest.approx(1 + 1 / math.log(rounds_log(delta, N=4)), rel=1e-3)


@given(deltas, st.integers(1, 100))
@quick
def test_more_clients_and_looser_targets_need_fewer_rounds(delta, N):
    for count in (rounds_log, rounds_log_summed, lambda delta, N: rounds_fixed(delta, N=N, K=3)):
        assert count(delta, N=2 * N) < count(delta, N=N)
        assert count(2 * delta, N=N) < count(delta, N=N)


def test_complexity_with_a_fixed_interval_does_not_depend_on_the_clients():
    few, many = (communication(0.01, N=N, K=5, params=10) for N in (2, 50))
    assert few.complexity == pytest.approx(many.complexity)
    assert few.complexity == pytest.approx(1 / (5 * 1e-4))


def test_bytes_count_three_vectors_each_way_and_two_with_restart():
    cost = communication(0.1, N=3, K=4, params=1000)
    assert cost.rounds == pytest.approx(25 / 3)
    assert cost.bytes_up == cost.bytes_down == 9 * 3 * 3 * 1000 * 4
    assert cost.bytes == 2 * cost.bytes_up
    assert communication(0.1, N=3, K=4, params=1000, momentum="restart").bytes_up == 9 * 3 * 2 * 1000 * 4
    assert communication(0.1, N=3, K=4, params=1000, bytes_per_value=2).bytes_up == cost.bytes_up / 2


def test_without_k_the_interval_is_logarithmic():
    assert communication(0.1, N=3, params=1).rounds == rounds_log(0.1, N=3)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: rounds_fixed(0, N=1, K=1), "delta"),
        (lambda: rounds_log(-1, N=1), "delta"),
        (lambda: rounds_log(1e-200, N=1), "double precision"),
        (lambda: rounds_fixed(0.1, N=1, K=1, constant=0), "constant"),
        (lambda: communication(0.1, N=1, params=0), "params"),
        (lambda: communication(0.1, N=1, params=1, momentum="none"), "momentum"),
    ],
)
def test_impossible_requests_are_refused_by_name(call, word):
    with pytest.raises(ValueError, match=word):
        call()
