import math

import numpy as np
import pytest

from fedlalr.paper.curve_measures import EARLY, EARLY_LOSS, FALL, FINAL, FINAL_LOSS, ROUGHNESS, Gap, gap, rounds_to
from paper.synthetic_curves import ROUNDS, curves, rising, with_drop

early_accuracy, final_accuracy, early_loss, final_loss = (one.measure for one in (EARLY, FINAL, EARLY_LOSS, FINAL_LOSS))
largest_drop, roughness = FALL.measure, ROUGHNESS.measure
STAIRS = np.arange(ROUNDS) / 100


def test_early_is_the_mean_of_the_first_quarter_and_final_that_of_the_last_tenth():
    one = curves(STAIRS, STAIRS + 0.5)
    assert early_accuracy(one) == pytest.approx([0.045, 0.545])
    assert final_accuracy(one) == pytest.approx([0.375, 0.875])
    falling = curves(STAIRS, loss=[1 - STAIRS])
    assert early_loss(falling) == pytest.approx([0.955])
    assert final_loss(falling) == pytest.approx([0.625])


def test_a_drop_is_measured_from_the_best_so_far_not_from_the_round_before():
    slow_fall = np.concatenate([np.full(20, 0.5), np.linspace(0.5, 0.3, 20)])
    assert largest_drop(curves(slow_fall)) == pytest.approx([0.2])
    assert largest_drop(curves(with_drop(rising(0.6), 0.1))) == pytest.approx([0.1], abs=0.01)
    assert largest_drop(curves(rising(0.6))) == pytest.approx([0])


def test_roughness_adds_up_falls_and_no_rises():
    saw = np.tile([0.5, 0.4], ROUNDS // 2)
    assert roughness(curves(saw)) == pytest.approx([0.1 * ROUNDS / 2])
    assert roughness(curves(STAIRS)) == pytest.approx([0])


def test_a_run_that_broke_off_counts_as_accuracy_zero_and_infinite_loss_from_there_on():
    broken = curves([0.5] * 10, loss=[[1.0] * 10], failures=["round 11: diverged"])
    assert early_accuracy(broken) == pytest.approx([0.5])
    assert final_accuracy(broken) == pytest.approx([0])
    assert largest_drop(broken) == pytest.approx([0.5])
    assert final_loss(broken) == [math.inf]
    assert early_loss(broken) == pytest.approx([1.0])


def test_differences_are_paired_over_common_seeds():
    first = curves([0.5] * ROUNDS, [0.6] * ROUNDS, [0.7] * ROUNDS, seeds=(0, 1, 2))
    second = curves([0.5] * ROUNDS, [0.75] * ROUNDS, seeds=(1, 2))
    one = gap(final_accuracy, [first], [second])
    assert one is not None
    assert one.seeds == (1, 2)
    assert one.differences == pytest.approx([0.1, -0.05])
    assert one.mean == pytest.approx(0.025)
    assert one.interval.low is not None
    assert one.interval.low < 0 < one.mean


def test_without_a_common_seed_there_is_no_difference():
    assert gap(final_accuracy, [curves([0.5], seeds=(0,))], [curves([0.5], seeds=(1,))]) is None


def test_infinite_losses_are_compared_without_an_interval():
    one = gap(final_loss, [curves([0.1], [0.1])], [curves([0.5] * ROUNDS, [0.5] * ROUNDS)])
    assert one is not None
    assert (one.mean, one.interval.low, one.between(0.0)) == (math.inf, None, "holds")


@pytest.mark.parametrize(
    ("first", "limits", "outcome"),
    [
        ([0.51, 0.512, 0.514], (0.0, math.inf), "holds"),
        ([0.49, 0.488, 0.486], (0.0, math.inf), "does not hold"),
        ([0.49, 0.52, 0.53], (0.0, math.inf), "undecided"),
        ([0.49, 0.488, 0.486], (-math.inf, 0.0), "holds"),
        ([0.501, 0.502, 0.503], (-0.02, 0.02), "holds"),
        ([0.531, 0.532, 0.533], (-0.02, 0.02), "does not hold"),
        ([0.50, 0.52, 0.54], (-0.02, 0.02), "undecided"),
        ([0.6], (0.0, math.inf), "holds"),
        ([0.5], (0.0, math.inf), "does not hold"),
    ],
)
def test_the_interval_decides_and_one_seed_decides_by_itself(first, limits, outcome):
    seeds = tuple(range(len(first)))
    assert Gap(np.array(first), np.full(len(first), 0.5), seeds).between(*limits) == outcome


def test_pairs_of_one_seed_have_no_interval_and_must_agree():
    assert Gap(np.array([0.6, 0.9]), np.array([0.5, 0.5]), (0,)).between(0.0) == "holds"
    assert Gap(np.array([0.6, 0.4]), np.array([0.5, 0.5]), (0,)).between(0.0) == "undecided"


def test_rounds_to_an_accuracy_count_from_one_and_may_be_infinite():
    measure = rounds_to(0.5).measure
    assert measure(curves([0.4, 0.5, 0.4, 0.6], [0.5], [0.1] * ROUNDS)).tolist() == [2, 1, math.inf]
    never = gap(measure, [curves([0.1], [0.6])], [curves([0.1], [0.1])])
    assert never is not None
    assert never.differences.tolist() == [0, -math.inf]
    assert never.between(high=0.0) == "undecided"


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_very_short_runs_have_an_early_and_a_final_accuracy(rounds):
    from dataclasses import replace

    short = curves([0.5] * ROUNDS)
    short = replace(short, accuracy=short.accuracy[:, :rounds])
    assert early_accuracy(short) == final_accuracy(short) == pytest.approx([0.5])
