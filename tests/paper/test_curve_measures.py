import math

import numpy as np
import pytest

from fedlalr.paper.curve_measures import (
    early_accuracy,
    early_loss,
    final_accuracy,
    final_loss,
    gap,
    largest_drop,
    roughness,
)
from paper.synthetic_curves import ROUNDS, curves, rising, with_drop

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
    one = gap(final_accuracy, first, second)
    assert one is not None
    assert (one.seeds, one.positive) == ((1, 2), 1)
    assert (one.first, one.second, one.mean) == (pytest.approx(0.65), pytest.approx(0.625), pytest.approx(0.025))
    assert one.interval.low is not None
    assert one.interval.low < 0 < one.mean


def test_without_a_common_seed_there_is_no_difference():
    assert gap(final_accuracy, curves([0.5], seeds=(0,)), curves([0.5], seeds=(1,))) is None


def test_infinite_losses_are_compared_without_an_interval():
    one = gap(final_loss, curves([0.1], [0.1]), curves([0.5] * ROUNDS, [0.5] * ROUNDS))
    assert one is not None
    assert (one.mean, one.interval.low, one.positive) == (math.inf, None, 2)


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_very_short_runs_have_an_early_and_a_final_accuracy(rounds):
    from dataclasses import replace

    short = curves([0.5] * ROUNDS)
    short = replace(short, accuracy=short.accuracy[:, :rounds])
    assert early_accuracy(short) == final_accuracy(short) == pytest.approx([0.5])
