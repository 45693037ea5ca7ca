"""Reduction over the cohort."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.replies.reducing import (
    mean_change,
    reduce_buffers,
    reduce_slots,
    weights,
)
from fedlalr.federation.replies.reductions import Mean

numbers = st.floats(-1e6, 1e6, width=32)
stacks = hnp.arrays("float32", st.tuples(st.integers(1, 20), st.integers(1, 5)), elements=numbers)


@settings(deadline=None)
@given(stack=stacks, data=st.data())
def test_a_mean_of_replies_above_the_broadcast_never_falls_below_it(stack, data):
    values = torch.from_numpy(stack)
    broadcast = values.amin(0)
    sizes = torch.tensor(data.draw(st.lists(st.integers(1, 10**6), min_size=len(values), max_size=len(values))))
    for how in ("uniform", "samples"):
        share = weights(sizes, how, torch.float32, torch.device("cpu"))
        assert (mean_change(values, broadcast, share) >= broadcast).all()


@settings(deadline=None)
@given(stack=stacks)
def test_a_coordinate_nobody_touched_stays_exactly(stack):
    broadcast = torch.from_numpy(stack)[0]
    values = broadcast.expand(50, -1)
    share = weights(torch.ones(50), "uniform", torch.float32, torch.device("cpu"))
    assert torch.equal(mean_change(values, broadcast, share), broadcast)


def test_the_plain_mean_of_fifty_small_numbers_would_fall_below_them():
    """Why the change is averaged and not the value."""
    v_hat = torch.full((50, 1), 1e-16)
    assert (v_hat.sum(0) / 50 < 1e-16).all() or (v_hat * (1 / 50)).sum(0) < v_hat[0]
    share = weights(torch.ones(50), "uniform", torch.float32, torch.device("cpu"))
    assert torch.equal(mean_change(v_hat, v_hat[0], share), v_hat[0])


@settings(deadline=None)
@given(stack=stacks)
def test_the_mean_is_the_mean_in_float64(stack):
    values = torch.from_numpy(stack).double()
    share = weights(torch.ones(len(values)), "uniform", torch.float64, torch.device("cpu"))
    torch.testing.assert_close(mean_change(values, values[0], share), values.mean(0), rtol=1e-12, atol=1e-6)
    torch.testing.assert_close(mean_change(values, None, share), values.mean(0), rtol=1e-12, atol=1e-6)


def test_slots_are_reduced_as_the_table_says():
    table = SlotTable(down=("x", "v_hat"), up={"x": "mean", "v_hat": "max", "delta": "mean"})
    uploads = Slots(
        x=torch.tensor([[1.0], [3.0]]), v_hat=torch.tensor([[1.0], [3.0]]), delta=torch.tensor([[2.0], [4.0]])
    )
    broadcast = Slots(x=torch.tensor([0.0]), v_hat=torch.tensor([0.0]))
    reduced = reduce_slots(uploads, broadcast, torch.tensor([0.5, 0.5]), table)
    assert {name: value.tolist() for name, value in reduced.items()} == {"x": [2.0], "v_hat": [3.0], "delta": [3.0]}


@pytest.mark.parametrize(
    ("give", "told"),
    [(lambda v: v.mean(), "a tensor ()"), (lambda v: v[:1], "a tensor (1, 3)"), (lambda v: None, "None")],
)
def test_a_reduction_that_does_not_give_a_number_for_each_coordinate_is_named(give, told):
    class Odd:
        def reduce(self, values, reference, share):
            return give(values)

    uploads, table = Slots(x=torch.arange(6.0).view(2, 3)), SlotTable(down=("x",), up={"x": "mean"})
    with pytest.raises(ValueError, match=r"the reduction of x must return a tensor \(3,\)") as error:
        reduce_slots(uploads, Slots(x=torch.zeros(3)), torch.tensor([0.5, 0.5]), table, {"x": Odd()})
    assert str(error.value).endswith(f"not {told}")


def test_a_reduction_in_another_precision_keeps_the_slots():
    class Precise:
        def reduce(self, values, reference, share):
            return values.double().mean(0)

    uploads, table = Slots(x=torch.arange(6.0).view(2, 3)), SlotTable(down=("x",), up={"x": "mean"})
    reduced = reduce_slots(uploads, Slots(x=torch.zeros(3)), torch.tensor([0.5, 0.5]), table, {"x": Precise()})
    assert reduced.x.dtype == torch.float32


def test_a_subclass_of_the_mean_is_called():
    class Doubled(Mean):
        def reduce(self, values, reference, share):
            return 2 * super().reduce(values, reference, share)

    uploads, broadcast = Slots(x=torch.tensor([[1.0], [3.0]])), Slots(x=torch.tensor([1.0]))
    table = SlotTable(down=("x",), up={"x": "mean"})
    reduced = reduce_slots(uploads, broadcast, torch.tensor([0.5, 0.5]), table, {"x": Doubled()})
    assert reduced.x.tolist() == [4.0]


def test_of_whole_numbers_in_buffers_the_median_is_taken():
    stacked = {
        "count": torch.tensor([1 << 62, 3, 9, 4]),
        "mean": torch.tensor([1.0, 2.0, 1.0, 2.0]),
        "places": torch.tensor([[0, -7], [0, 1], [0, 1], [0, 1]]),
        "mask": torch.tensor([[True], [False], [False], [False]]),
        "turns": torch.tensor([[1j], [1j], [1 + 1j], [1 + 1j]]),
        "large": torch.tensor([1e9, 1e9 + 1, 1e9 + 2, 1e9 + 1], dtype=torch.float64),
    }
    reduced = reduce_buffers(stacked, torch.full((4,), 0.25) * (1 + 1e-7))
    assert list(reduced) == list(stacked)
    assert reduced["count"] == 4
    assert reduced["mean"] == 1.5
    assert reduced["places"].tolist() == [0, 1]
    assert reduced["mask"].tolist() == [False]
    assert reduced["turns"].tolist() == [0.5 + 1j]
    assert reduced["large"] == 1e9 + 1


@settings(deadline=None)
@given(stack=stacks, data=st.data())
def test_the_mean_of_buffers_lies_within_what_the_replies_span(stack, data):
    values = torch.from_numpy(stack)
    sizes = torch.tensor(data.draw(st.lists(st.integers(1, 10**6), min_size=len(values), max_size=len(values))))
    share = weights(sizes, "samples", torch.float32, torch.device("cpu"))
    mean = reduce_buffers({"mean": values}, share)["mean"]
    assert ((values.amin(0) <= mean) & (mean <= values.amax(0))).all()
    smallest = torch.finfo(values.dtype).smallest_normal * torch.finfo(values.dtype).eps  # each product may lose one
    tolerance = 1e-5 * float(values.abs().max()) + len(values) * smallest
    torch.testing.assert_close(mean, (values * share[:, None]).sum(0), rtol=1e-5, atol=tolerance)


def test_a_reduction_that_picks_a_reply_gets_memory_of_its_own():
    class First:
        def reduce(self, values, reference, share):
            return values[0]

    uploads = Slots(x=torch.arange(6.0).view(2, 3))
    table = SlotTable(down=("x",), up={"x": "mean"})
    reduced = reduce_slots(uploads, Slots(x=torch.zeros(3)), torch.tensor([0.5, 0.5]), table, {"x": First()})
    uploads.x.zero_()  # as an engine that reuses its memory does
    assert reduced.x.tolist() == [0.0, 1.0, 2.0]
