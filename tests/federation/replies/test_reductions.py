"""Robust reductions: results, invariants, and how far one hostile reply can move them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr import reductions
from fedlalr.federation.replies import reductions as robust
from fedlalr.federation.replies.reductions import REDUCTIONS, as_reductions, change_norms, norms_and_falls

EVERY = [
    reductions.Mean(),
    reductions.Max(),
    reductions.Median(),
    reductions.Trimmed(0.2),
    reductions.Trimmed(0.45),
    reductions.Bounded(1.0),
    reductions.Bounded(5.0),
]
numbers = st.floats(-1e6, 1e6, width=32)
stacks = hnp.arrays("float32", st.tuples(st.integers(1, 12), st.integers(1, 5)), elements=numbers)
every = pytest.mark.parametrize("reduction", EVERY, ids=repr)


def even(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((count,), 1 / count, dtype=dtype)


@every
@settings(deadline=None, max_examples=50)
@given(stack=stacks)
def test_what_is_above_the_broadcast_stays_above_it(reduction, stack):
    values = torch.from_numpy(stack)
    broadcast = values.amin(0)
    assert (reduction.reduce(values, broadcast, even(len(values))) >= broadcast).all()


@every
@settings(deadline=None, max_examples=50)
@given(stack=stacks)
def test_a_coordinate_nobody_touched_stays_exactly(reduction, stack):
    broadcast = torch.from_numpy(stack)[0]
    values = broadcast.expand(7, -1).clone()
    values[:, 1:] += torch.arange(7.0)[:, None]
    assert torch.equal(reduction.reduce(values, broadcast, even(7))[:1], broadcast[:1])


@settings(deadline=None, max_examples=50)
@given(stack=stacks)
def test_the_median_is_numpys(stack):
    values = torch.from_numpy(stack).double()
    found = reductions.Median().reduce(values, values[0], even(len(values), torch.float64))
    np.testing.assert_allclose(found.numpy(), np.median(values.numpy(), axis=0), rtol=1e-12, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(stack=stacks, share=st.floats(0.01, 0.49))
def test_the_trimmed_mean_leaves_out_both_ends(stack, share):
    values = torch.from_numpy(stack).double()
    count = len(values)
    out = min(int(np.ceil(share * count)), (count - 1) // 2)
    expected = np.sort(values.numpy(), axis=0)[out : count - out].mean(0)
    found = reductions.Trimmed(share).reduce(values, None, even(count, torch.float64))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-6)


def test_the_trimmed_mean_of_a_small_cohort_leaves_out_at_least_one_at_either_end():
    values = torch.tensor([[-900.0], [1.0], [2.0], [3.0], [900.0]])
    assert reductions.Trimmed(0.01).reduce(values, None, even(5)) == 2.0


def test_a_bounded_mean_cuts_a_long_change_to_the_median_length_and_leaves_short_ones():
    broadcast = torch.tensor([1.0, 1.0])
    values = broadcast + torch.tensor([[3.0, 4.0], [0.0, 5.0], [3000.0, 4000.0], [0.6, 0.8]])  # lengths 5, 5, 5000, 1
    share = torch.tensor([0.1, 0.2, 0.3, 0.4])
    cut = torch.tensor([[3.0, 4.0], [0.0, 5.0], [3.0, 4.0], [0.6, 0.8]])
    expected = broadcast + (cut * share[:, None]).sum(0)
    torch.testing.assert_close(reductions.Bounded(1.0).reduce(values, broadcast, share), expected)


def test_a_bounded_mean_holds_where_most_of_the_cohort_stood_still():
    """The median of the norms is exactly 0 then, as for v̂ late in training: the bound is a share of the broadcast."""
    broadcast = torch.tensor([30.0, 40.0])
    values = broadcast.repeat(4, 1)
    values[3, 0] += 4e16
    found = reductions.Bounded(5.0).reduce(values, broadcast, even(4))
    torch.testing.assert_close(found, broadcast + torch.tensor([5 * robust.SHARE * 50 / 4, 0.0]))
    values[3, 0] = 30 + 4.9 * robust.SHARE * 50
    torch.testing.assert_close(reductions.Bounded(5.0).reduce(values, broadcast, even(4)), values.mean(0))


@pytest.mark.parametrize("reduction", [reductions.Median(), reductions.Trimmed(0.2), reductions.Bounded(1.0)], ids=repr)
@settings(deadline=None, max_examples=50)
@given(hostile=st.floats(-(2.0**100), 2.0**100, width=32))
def test_one_hostile_reply_in_seven_moves_the_result_no_further_than_the_honest_ones_reach(reduction, hostile):
    values = torch.arange(7.0)[:, None].repeat(1, 3)
    values[6] = hostile
    found = reduction.reduce(values, torch.zeros(3), even(7))
    assert (found >= -6).all()
    assert (found <= 6).all()


def test_sorting_in_parts_gives_the_same_result(monkeypatch):
    torch.manual_seed(0)
    values, broadcast = torch.randn(9, 1000), torch.randn(1000)
    whole = [
        reduction.reduce(values, broadcast, even(9)) for reduction in (reductions.Median(), reductions.Trimmed(0.2))
    ]
    monkeypatch.setattr(robust, "COORDINATES_AT_A_TIME", 100)
    parts = [
        reduction.reduce(values, broadcast, even(9)) for reduction in (reductions.Median(), reductions.Trimmed(0.2))
    ]
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("algorithm", [fl.FedLALR(), fl.FedLALR(second_moment="max"), fl.SCAFFOLD(0.1)], ids=str)
def test_every_reduction_trains_and_keeps_v_hat_growing(name, algorithm):
    seen = []

    class Watch(fl.Observer):
        def on_round(self, record):
            seen.append(record.clients)

    how = dict.fromkeys(algorithm.slots.up, name)
    result = fl.run(
        make_model(), make_clients(), algorithm, rounds=3, local=fl.Steps(3), batch_size=4, reduce=how,
        engine="reference", observers=[Watch()],
    )  # fmt: skip
    assert seen == [5, 5, 5]
    if "v_hat" in result.state:
        assert all((value >= 1e-16).all() for value in result.state["v_hat"].values())


def test_slots_are_reduced_each_in_its_own_way():
    common = {"rounds": 1, "local": fl.Steps(3), "batch_size": None, "engine": "reference"}

    def run(**how):
        return fl.run(make_model(), make_clients(), fl.FedLALR(), **common, **how).state

    plain, mixed, median = (
        run(),
        run(reduce={"v_hat": "median"}),
        run(reduce={"x": "median", "v_hat": reductions.Median()}),
    )
    same = {slot: torch.equal(plain[slot]["0.weight"], mixed[slot]["0.weight"]) for slot in plain}
    assert same == {"x": True, "m": True, "v_hat": False}
    assert torch.equal(mixed["v_hat"]["0.weight"], median["v_hat"]["0.weight"])
    assert not torch.equal(plain["x"]["0.weight"], median["x"]["0.weight"])


TABLE = fl.FedLALR().slots


def test_names_tables_and_objects_are_understood():
    given = {"x": "median", "m": {"name": "trimmed", "share": 0.1}, "v_hat": reductions.Bounded(3)}
    slots = {"x": reductions.Median(), "m": reductions.Trimmed(0.1), "v_hat": reductions.Bounded(3)}
    assert as_reductions(given, TABLE) == slots | {"buffers": reductions.Median()}
    assert as_reductions(None, TABLE) == {}


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"x": "medain"}, ValueError, "x cannot be reduced by 'medain'.*Did you mean 'median'?"),
        ({"v": "median"}, ValueError, "the slot 'v', but the clients send x, m, v_hat"),
        ({"vhat": "max"}, ValueError, "Did you mean 'v_hat'?"),
        ({"x": 3}, TypeError, "the reduction of x must be one of 'mean'.*not 3"),
        ({"x": reductions.Median}, TypeError, "or an object such as fl.reductions.Trimmed"),
        ({"x": {"name": "trimmed", "part": 0.1}}, ValueError, "of x has no option 'part'; it takes share"),
        ("median", TypeError, "reduce must be a dict from slot to reduction"),
    ],
)
def test_wrong_reductions_are_rejected_with_a_message(given, kind, message):
    with pytest.raises(kind, match=message):
        as_reductions(given, TABLE)


@pytest.mark.parametrize("share", [0.0, 0.5, -0.1, True, float("nan"), "a"])
def test_a_share_outside_its_range_is_rejected(share):
    with pytest.raises(ValueError, match=r"must lie in \(0, 0.5\)"):
        reductions.Trimmed(share)


def test_a_ratio_that_is_not_positive_is_rejected():
    with pytest.raises(ValueError, match="the ratio of Bounded must be a finite number above 0"):
        reductions.Bounded(0)


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-30, 1e-12, 1.0, 1e14, 1e30, 1e38])
def test_rough_norms_are_right_at_any_scale(scale):
    values = torch.linspace(-1, 1, 3003).view(3, 1001) * scale
    rough, exact = change_norms(values, rough=True).double(), values.double().norm(dim=1)
    assert rough.isfinite().all()
    assert torch.allclose(rough, exact, rtol=1e-3, atol=0)
    norms, fell = norms_and_falls(values, values[0])
    assert torch.allclose(norms.double(), (values.double() - values[0].double()).norm(dim=1), rtol=1e-3, atol=0)
    assert fell.tolist() == [False, False, False]
    assert norms_and_falls(values[:2], values[2])[1].tolist() == [scale > 0] * 2


def test_rounding_does_not_trim_one_reply_more():
    values = torch.arange(100.0)[:, None] ** 3
    mean = reductions.Trimmed(0.07).reduce(values, None, torch.full((100,), 0.01))
    assert mean.item() == pytest.approx(values[7:93].mean().item())


def test_rough_norms_are_right_at_any_length():
    values = torch.full((1, 10_000_000), 2.0**-13)
    values[0, 0] = 1.0  # in float32 the others are lost on it, one by one
    assert float(change_norms(values, rough=True)) == pytest.approx(float(values.double().norm()), rel=1e-3)


def test_a_long_row_is_measured_in_pieces():
    values, reference = torch.randn(2, 1_000_000), torch.randn(1_000_000).sub_(10)
    values[1, -1] = reference[-1] - 1
    norms, fell = norms_and_falls(values, reference)
    exact = (values.double() - reference.double()).norm(dim=1)
    assert fell.tolist() == [False, True]
    assert torch.allclose(norms, exact, rtol=1e-3)
    assert torch.allclose(change_norms(values, reference), exact, rtol=1e-6)
