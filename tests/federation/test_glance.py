"""A cohort that is cleared at a glance is one of which nobody would be refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlalr as fl
from fedlalr.algorithms.slots import Slots
from fedlalr.federation.replies import glance, reducing
from fedlalr.federation.replies.glance import plainly_sound
from fedlalr.federation.replies.reducing import small_changes
from fedlalr.federation.replies.screening import MAX_NORM_RATIO, Measured, screen
from fedlalr.training.interfaces import Replies

TABLE = fl.FedLALR().slots
ROWS, SIZE = 7, 300
CACHES = [0, reducing.NUMBERS_IN_CACHE]
"""Either way of looking: at a stack that is larger than the cache, and at one that fits."""


def cohort(scale: float = 1.0, change: float = 0.3, dtype: torch.dtype = torch.float32) -> tuple[Slots, Slots]:
    """A broadcast and honest uploads."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, m, v_hat = noise(SIZE), noise(SIZE), noise(SIZE).square() + 0.1
    uploads = Slots(
        x=(x * (1 + change / 2) + change * noise(ROWS, SIZE)) * scale,
        m=noise(ROWS, SIZE) * 2 * scale,
        v_hat=(v_hat + change * noise(ROWS, SIZE).square()) * scale,
    )
    broadcast = Slots(x=x * scale, m=m * scale, v_hat=v_hat * scale)
    return broadcast.map(lambda t: t.to(dtype)), uploads.map(lambda t: t.to(dtype))


def stacked(uploads: Slots) -> Replies:
    ids = torch.arange(len(next(iter(uploads.values()))))
    return Replies(ids, ids + 1, ids + 1, torch.ones(len(ids)), uploads, {}, Slots())


def is_cleared(broadcast: Slots, uploads: Slots, ratio: float | None = MAX_NORM_RATIO) -> bool:
    replies = stacked(uploads)
    return plainly_sound(replies, broadcast, TABLE, ratio, small_changes(replies, broadcast))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_honest_cohort_is_cleared(monkeypatch, cache, dtype):
    monkeypatch.setattr(reducing, "NUMBERS_IN_CACHE", cache)
    assert is_cleared(*cohort(dtype=dtype))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("slot", ["x", "m", "v_hat"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e30, 1e38])
@pytest.mark.parametrize("row", [0, 3, ROWS - 1])
def test_a_number_that_is_not_finite_or_huge_is_never_cleared(monkeypatch, cache, slot, value, row):
    monkeypatch.setattr(reducing, "NUMBERS_IN_CACHE", cache)
    broadcast, uploads = cohort()
    uploads[slot][row, SIZE - 1] = value
    assert not is_cleared(broadcast, uploads)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38])
def test_a_whole_cohort_of_such_numbers_is_never_cleared(monkeypatch, cache, value):
    monkeypatch.setattr(reducing, "NUMBERS_IN_CACHE", cache)
    broadcast, uploads = cohort()
    for slot in uploads:
        assert not is_cleared(broadcast, uploads.replace(**{slot: torch.full((ROWS, SIZE), value)}))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(("value", "cleared"), [(1.0, True), (math.nan, False), (math.inf, False), (1e6, False)])
def test_a_slot_that_was_not_broadcast_is_looked_at_as_a_change(monkeypatch, cache, value, cleared):
    monkeypatch.setattr(reducing, "NUMBERS_IN_CACHE", cache)
    delta = cohort()[1].m
    delta[2, 7] = value
    table = fl.FedAdam().slots
    replies = stacked(Slots(**dict.fromkeys(table.up, delta)))
    assert set(table.up).isdisjoint(table.down)
    assert plainly_sound(replies, Slots(x=cohort()[0].x), table, MAX_NORM_RATIO, {}) is cleared
    assert (screen(replies, Slots(x=cohort()[0].x), table)[1] == ()) is cleared


@pytest.mark.parametrize("cache", CACHES)
def test_the_smallest_fall_of_what_grows_is_never_cleared(monkeypatch, cache):
    monkeypatch.setattr(reducing, "NUMBERS_IN_CACHE", cache)
    broadcast, uploads = cohort()
    base = broadcast.v_hat[5]
    uploads.v_hat[4, 5] = base
    assert is_cleared(broadcast, uploads)
    uploads.v_hat[4, 5] = torch.nextafter(base, torch.tensor(0.0))
    assert not is_cleared(broadcast, uploads)


@pytest.mark.parametrize("cache", CACHES)
@settings(deadline=None, max_examples=150)
@given(
    slot=st.sampled_from(["x", "m", "v_hat"]),
    row=st.integers(0, ROWS - 1),
    factor=st.sampled_from([0.0, 0.9, 1.1, 30.0, 990.0, 1010.0, 1e5, 1e12, 1e20]),
    exponent=st.integers(-40, 36),
    change=st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0, 50.0]),
    ratio=st.sampled_from([0.5, 1.0, 3.0, 1000.0, 1e9]),
)
def test_what_is_cleared_passes_every_rule(cache, slot, row, factor, exponent, change, ratio):
    broadcast, uploads = cohort(10.0**exponent, change)
    base = broadcast[slot]
    uploads[slot][row] = base + factor * (uploads[slot][row] - base)
    replies = stacked(uploads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reducing, "NUMBERS_IN_CACHE", cache)
        if is_cleared(broadcast, uploads, ratio):
            assert Measured.of(replies, broadcast, TABLE, {}).reasons(ratio) == {}


@pytest.mark.parametrize("cache", CACHES)
def test_a_cohort_that_is_not_cleared_is_measured_and_passes(monkeypatch, cache):
    monkeypatch.setattr(reducing, "NUMBERS_IN_CACHE", cache)
    broadcast, uploads = cohort()
    still = broadcast.map(lambda base: base.expand(ROWS, -1).clone())
    assert not is_cleared(broadcast, still)
    assert screen(stacked(still), broadcast, TABLE)[1] == ()
    assert screen(stacked(uploads), broadcast, TABLE, max_norm_ratio=None)[1] == ()


@pytest.mark.parametrize("lie", ["uploads", "broadcast"])
def test_numbers_that_lie_apart_are_not_looked_at_roughly(monkeypatch, lie):
    monkeypatch.setattr(reducing, "NUMBERS_IN_CACHE", 0)
    broadcast, uploads = cohort()
    assert is_cleared(broadcast, uploads)
    if lie == "uploads":
        uploads = uploads.map(lambda slot: slot.t().contiguous().t())
    else:
        broadcast = broadcast.map(lambda slot: slot[:, None].repeat(1, 2)[:, 0])
    assert not is_cleared(broadcast, uploads)


def test_norms_in_float32_have_three_digits_where_they_are_trusted():
    for values in (torch.full((1, glance.SUMMED), 0.1), torch.full((1, glance.SUMMED), 2.0**-13)):
        values[0, 0] = 1.0
        exact = float(values.double().norm())
        assert glance._norms(values)[0] == pytest.approx(exact, rel=glance.ROUGH)
