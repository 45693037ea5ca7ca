import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr.theory import adaptive_step_size, cap, largest_smoothness, log_intervals, step_size


def test_step_size_is_the_root_where_the_cap_is_loose():
    step = step_size(N=4, K=10, T=1000, eps=1.0, L=1.0)
    assert (step.alpha, step.uncapped, step.cap, step.cap_binds) == (0.02, 0.02, 0.15, False)


def test_step_size_is_the_cap_where_it_is_tight():
    step = step_size(N=4, K=1, T=1, eps=0.2, L=3.0)
    assert step.alpha == step.cap == pytest.approx(0.01)
    assert step.uncapped == 2
    assert step.cap_binds


def test_step_size_of_the_adaptive_interval_takes_the_sum_of_all_steps():
    assert adaptive_step_size(N=9, intervals=[1, 3, 5, 16], eps=100, L=1).alpha == 0.6


def test_equal_intervals_give_the_step_size_of_the_fixed_one():
    assert adaptive_step_size(N=3, intervals=[7] * 11, eps=1, L=1) == step_size(N=3, K=7, T=11, eps=1, L=1)


def test_the_papers_own_setting_asks_for_a_nearly_flat_loss():
    assert largest_smoothness(eps=1e-8, alpha=2e-3) == pytest.approx(7.5e-7)
    assert cap(eps=1e-8, L=7.5e-7) == pytest.approx(2e-3)


@given(T=st.integers(1, 3000), start=st.integers(1, 9), base=st.integers(2, 12))
@settings(deadline=None, max_examples=50)
def test_log_intervals_are_the_floor_of_the_logarithm_exactly(T, start, base):
    expected, power, exponent = [], base, 0
    for t in range(1, T + 1):
        if t == power:
            power, exponent = power * base, exponent + 1
        expected.append(start + exponent)
    assert log_intervals(T, start=start, base=float(base)).tolist() == expected


def test_log_intervals_accept_a_base_between_whole_numbers():
    assert log_intervals(6, start=1, base=1.5).tolist() == [1, 2, 3, 4, 4, 5]  # 1.5, 2.25, 3.375, 5.0625 are passed


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: step_size(N=0, K=1, T=1, eps=1, L=1), "N"),
        (lambda: step_size(N=1, K=-3, T=1, eps=1, L=1), "K"),
        (lambda: step_size(N=1, K=1, T=1, eps=-1, L=1), "eps"),
        (lambda: step_size(N=1, K=1, T=1, eps=1, L=0), "L"),
        (lambda: adaptive_step_size(N=1, intervals=[], eps=1, L=1), "non-empty"),
        (lambda: adaptive_step_size(N=1, intervals=[3, 2], eps=1, L=1), "not decrease"),
        (lambda: adaptive_step_size(N=1, intervals=[0, 2], eps=1, L=1), "at least 1"),
        (lambda: adaptive_step_size(N=1, intervals=[1.5], eps=1, L=1), "whole"),
        (lambda: log_intervals(5, start=3, base=1.0), "at least 1.001"),
        (lambda: largest_smoothness(eps=1, alpha=0), "alpha"),
    ],
)
def test_impossible_numbers_are_refused_by_name(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def test_a_fractional_number_of_rounds_is_refused():
    with pytest.raises(ValueError, match="T must be a whole number"):
        step_size(N=1, K=1, T=2.5, eps=1, L=1)
