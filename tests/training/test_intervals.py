"""Intervals between synchronisations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fedlalr as fl

PASSES = torch.tensor([3, 1, 10])


def test_steps_are_the_same_for_every_client():
    assert fl.Steps(4).steps(1, PASSES).tolist() == [4, 4, 4]


def test_epochs_follow_the_size_of_a_client():
    assert fl.Epochs(5).steps(7, PASSES).tolist() == [15, 5, 50]


@pytest.mark.parametrize(("t", "expected"), [(1, 3), (2, 4), (3, 4), (4, 5), (63, 8), (64, 9), (65, 9), (2**40, 43)])
def test_log_interval_is_exact_at_powers_of_the_base(t, expected):
    assert fl.LogInterval(start=3, base=2.0).length(t) == expected


def test_log_interval_counts_steps_or_epochs():
    assert fl.LogInterval(3, 4.0).steps(16, PASSES).tolist() == [5, 5, 5]
    assert fl.LogInterval(3, 4.0, unit="epochs").steps(16, PASSES).tolist() == [15, 5, 50]


@example(start=1, base=27, exponent=12, t=1)  # no floating-point number is 27 to the 12th
@settings(deadline=None)
@given(start=st.integers(1, 50), base=st.integers(2, 30), exponent=st.integers(0, 12), t=st.integers(1, 10**6))
def test_log_interval_is_the_floor_of_the_logarithm(start, base, exponent, t):
    interval = fl.LogInterval(start, float(base))
    assert interval.length(base**exponent) == start + exponent
    assert base ** (interval.length(t) - start) <= t < base ** (interval.length(t) - start + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fl.Steps(0), "Steps's count must be a whole number of at least 1, not 0"),
        (lambda: fl.Steps(10**20), "Steps's count must be at most 10,000,000, not 1000"),
        (lambda: fl.Epochs(1.5), "Epochs's count must be a whole number"),
        (lambda: fl.LogInterval(0, 2.0), "LogInterval's start must be"),
        (lambda: fl.LogInterval(3, 1.0), "LogInterval's base must be a finite number of at least 1.001"),
        (lambda: fl.LogInterval(3, 1.0 + 1e-9), "LogInterval's base must be a finite number of at least 1.001"),
        (
            lambda: fl.LogInterval(3, 2.0, unit="rounds"),
            "LogInterval's unit must be one of 'steps', 'epochs', not 'rounds'",
        ),
    ],
)
def test_bad_intervals_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("interval", [fl.Steps, fl.Epochs, lambda count: fl.LogInterval(count, 2.0)])
def test_a_count_of_numpy_is_the_same_as_python_s(interval):
    assert repr(interval(np.int64(3))) == repr(interval(3))


class Own:
    """An interval as a user may write it."""

    def __init__(self, give):
        self.give = give

    def steps(self, round, batches_per_pass):
        return self.give(batches_per_pass)


@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize(
    "give",
    [
        lambda passes: 1.5 * passes,
        lambda passes: passes - 100,
        lambda passes: passes[:1],
        lambda passes: passes[:, None],
        lambda passes: [1] * len(passes),
        lambda passes: 3,
    ],
    ids=["halves", "negative", "too few", "a column", "a list", "a number"],
)
def test_an_interval_that_gives_no_number_for_each_client_is_rejected_before_anything_runs(engine, give):
    clients = [(torch.randn(size, 3), torch.zeros(size, dtype=torch.int64)) for size in (4, 6, 5)]
    with pytest.raises(ValueError, match=r"Own.steps must return the number of local steps of each of the 3 clients"):
        fl.run(torch.nn.Linear(3, 2), clients, fl.FedAvg(), rounds=1, local=Own(give), engine=engine, device="cpu")


def test_an_interval_of_ones_own_may_count_in_any_whole_numbers():
    clients = [(torch.randn(size, 3), torch.zeros(size, dtype=torch.int64)) for size in (4, 6, 5)]
    local = Own(lambda passes: (2 * passes).to(torch.int32))
    options = {"rounds": 1, "batch_size": 2, "engine": "reference", "device": "cpu"}
    model = torch.nn.Linear(3, 2)
    mine, right = (fl.run(model, clients, fl.FedAvg(), local=each, **options) for each in (local, fl.Epochs(2)))
    assert torch.equal(mine.state["x"]["weight"], right.state["x"]["weight"])
