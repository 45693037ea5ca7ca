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
        with pytest.raises(ValueError, match="pairs need equally many values"):
            paired_difference(first, second)
