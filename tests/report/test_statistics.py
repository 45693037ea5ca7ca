import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr.report.statistics import paired_difference, spread

numbers = st.lists(st.floats(-1, 1), min_size=2, max_size=8)


def test_the_interval_is_students() -> None:
    # differences 1, 2, 3: mean 2, deviation 1, and t(0.975, 2) = 4.302653
    mean, low, high = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert mean == pytest.approx(2)
    assert low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)


def test_one_pair_has_no_interval() -> None:
    alone = paired_difference([0.9], [0.8])
    assert alone.low is None
    assert alone.high is None
    assert not alone.excludes_zero
    assert spread([0.5]).deviation is None


def test_diverged_losses_have_a_spread_though_their_squares_overflow() -> None:
    mean, deviation = spread([1e200, 3e200])
    assert mean == pytest.approx(2e200)
    assert deviation == pytest.approx(math.sqrt(2) * 1e200)


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("difference", [-0.023, 0.0, 0.1])
def test_equal_differences_have_no_interval(count: int, difference: float) -> None:
    values = [0.1 * (i + 1) for i in range(count)]
    level = paired_difference([value + difference for value in values], values)
    assert level.mean == pytest.approx(difference, abs=1e-12)
    assert (level.low, level.high) == (None, None)
    assert not level.excludes_zero


def test_differences_that_are_nearly_equal_have_a_narrow_interval() -> None:
    near = paired_difference([0.9, 0.8001], [0.8, 0.7])
    assert near.low is not None
    assert near.high is not None
    assert 0 < near.high - near.low < 0.002
    assert near.excludes_zero


@settings(deadline=None, max_examples=50)
@given(numbers)
def test_what_both_sides_share_does_not_matter(values: list[float]) -> None:
    differences = [0.1 * (i % 3) for i in range(len(values))]
    shifted = [value + difference for value, difference in zip(values, differences, strict=True)]
    interval, plain = paired_difference(shifted, values), paired_difference(differences, [0.0] * len(values))
    assert interval == pytest.approx(plain, abs=1e-9)
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low <= interval.mean <= interval.high


def test_unequal_or_empty_sides_are_refused() -> None:
    for first, second in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(ValueError, match="pairs need the same number of values"):
            paired_difference(first, second)
