"""The Gaussian mechanism: what one client can change, the noise, and the sum in every method."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.data.population import as_clients
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.options import Options
from fedlalr.federation.privacy.mechanism import Mechanism, PrivateReduction, clipped_sum, secure_noise, seeded_noise
from fedlalr.federation.problem import Problem
from fedlalr.federation.session import initial_state
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Buffers, Replies, Work
from variants import VARIANTS

CPU = torch.device("cpu")
METHODS = {name: method for name, method in VARIANTS.items() if "max" not in method.slots.up.values()}

anything = st.floats(width=32) | st.floats(-2, 2, width=32)
stacks = hnp.arrays("float32", st.tuples(st.integers(1, 6), st.integers(1, 5)), elements=anything)


def norm(*tables: dict[str, Tensor]) -> float:
    """The norm of everything in some tables together."""
    return float(torch.cat([each.flatten() for table in tables for each in table.values()]).norm())


@settings(deadline=None)
@given(stack=stacks, data=st.data())
def test_a_client_more_changes_the_sum_by_at_most_the_clip(stack, data):
    """Whatever it sends: huge numbers, infinities, NaN."""
    x = torch.from_numpy(stack)
    m = torch.from_numpy(data.draw(hnp.arrays("float32", (len(stack), 3), elements=anything)))
    references, units = {"m": torch.tensor([1.0, -1.0, 0.5])}, {"x": 0.5, "m": torch.tensor([1e-3, 1.0, 7.0]).double()}
    whole = clipped_sum({"x": x, "m": m}, references, units, clip=0.7)
    for left_out in range(len(stack)):
        rest = torch.arange(len(stack)) != left_out
        others = clipped_sum({"x": x[rest], "m": m[rest]}, references, units, clip=0.7)
        change = {slot: whole[slot] - others[slot] for slot in whole}
        assert norm(change) <= 0.7 * (1 + 1e-12 * len(stack))  # float64 rounding of sums of at most 6 · 0.7


def test_a_change_below_the_clip_is_kept_and_one_above_keeps_its_direction():
    replies = {"x": torch.tensor([[0.3, 0.4], [30.0, 40.0]], dtype=torch.float64)}
    total = clipped_sum(replies, {}, {"x": 1.0}, clip=1.0)["x"]
    torch.testing.assert_close(total, torch.tensor([0.3 + 0.6, 0.4 + 0.8], dtype=torch.float64))


def test_the_clip_is_joint_and_in_units():
    """(3, 4 / 10) in units (1, 0.1) is (3, 4), of norm 5."""
    values = {"x": torch.tensor([[3.0]]).double(), "m": torch.tensor([[0.4]]).double()}
    total = clipped_sum(values, {}, {"x": 1.0, "m": 0.1}, clip=1.0)
    torch.testing.assert_close(total["x"], torch.tensor([0.6]).double())
    torch.testing.assert_close(total["m"], torch.tensor([0.8]).double())


def test_rows_are_summed_in_parts_of_bounded_size(monkeypatch):
    values = {"x": torch.randn(7, 5, dtype=torch.float64)}
    whole = clipped_sum(values, {}, {"x": 1.0}, clip=1.0)["x"]
    monkeypatch.setattr("fedlalr.federation.privacy.mechanism.NUMBERS_AT_A_TIME", 10)
    torch.testing.assert_close(clipped_sum(values, {}, {"x": 1.0}, clip=1.0)["x"], whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("noise", [seeded_noise(3, 1), secure_noise], ids=["seeded", "secure"])
def test_noise_is_standard_normal(noise):
    """Moments of 200,001 numbers within five standard errors, and no correlation between neighbours or halves."""
    count = 200_001
    z = noise("x", count, CPU).numpy()
    assert z.shape == (count,)
    assert z.dtype == np.float64
    for power, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((z**power).mean() - expected) < 5 * math.sqrt(variance / count)
    half = count // 2
    for other in (z[1:], z[half:]):
        assert abs((z[: len(other)] * other).mean()) < 5 / math.sqrt(len(other))
    assert abs((z[:half] ** 2 * z[half : 2 * half] ** 2).mean() - 1) < 5 * math.sqrt(8 / half)


def test_seeded_noise_is_a_function_of_seed_round_and_slot():
    first = seeded_noise(0, 1)("x", 5, CPU)
    assert torch.equal(first, seeded_noise(0, 1)("x", 5, CPU))
    for other in (seeded_noise(1, 1)("x", 5, CPU), seeded_noise(0, 2)("x", 5, CPU), seeded_noise(0, 1)("m", 5, CPU)):
        assert not torch.isclose(first, other).any()


def test_secure_noise_is_new_every_time_and_drawn_in_parts(monkeypatch):
    monkeypatch.setattr("fedlalr.federation.privacy.mechanism.NUMBERS_AT_A_TIME", 4)
    first, second = secure_noise("x", 11, CPU), secure_noise("x", 11, CPU)
    assert len(first.unique()) == 11
    assert not (first == second).any()


def test_a_release_is_the_noised_sum_by_the_expected_cohort_in_units():
    mechanism = Mechanism(fl.Privacy(clip=2.0, noise_multiplier=0.5), 0.5, cohort=4, population=10, rounds=None)
    total = {"x": torch.tensor([1.0, 2.0]).double()}
    released = mechanism.release(total, {"x": 0.1}, lambda slot, count, device: torch.tensor([1.0, -1.0]).double())
    torch.testing.assert_close(released["x"], 0.1 * torch.tensor([1.0 + 0.5 * 2, 2.0 - 0.5 * 2]).double() / 4)
    assert mechanism.deviation(0.1) == pytest.approx(0.1 * 0.5 * 2 / 4)


def units_of(algorithm: fl.Algorithm) -> dict[str, float]:
    """A small unit for every slot but the first."""
    return dict.fromkeys(list(algorithm.slots.up)[1:], 1e-2)


def a_round(name: str, compression: Any, model: nn.Module) -> tuple[Any, Replies, Buffers]:
    """The replies of a round of ragged clients, client 1 of which has become NaN, and how to reduce them."""
    algorithm, pairs = METHODS[name], make_clients()
    privacy = fl.Privacy(clip=1e-5, noise_multiplier=1.0, units=units_of(algorithm) | {"buffers": 0.1})
    options = Options(privacy=privacy, local=fl.Steps(3), batch_size=4, compression=compression, device="cpu")
    problem = Problem.of(model, as_clients(pairs, None, None), algorithm, options)
    training, state = problem.training, initial_state(problem.training)
    channel, everyone = Channel.of(problem.rules.compression, training, 1), torch.arange(len(pairs))
    nothing = torch.zeros(len(pairs), training.layout.size, dtype=torch.float64)
    work = Work(
        round=1,
        lr=algorithm.lr,
        clients=everyone,
        broadcast=channel.broadcast(state.slots.only(*algorithm.slots.down)),
        buffers=state.buffers,
        kept=algorithm.slots.nothing_kept(nothing),
        cohort=2,
        population=len(pairs),
        shapes=training.shapes,
    )
    replies = channel.replies(ReferenceEngine(training).train(work), work.broadcast, {})
    broken = replies.slots.map(lambda values: values.clone())
    broken[next(iter(broken))][1] = torch.nan
    assert problem.rules.mechanism is not None

    def reduction() -> PrivateReduction:
        return PrivateReduction(
            problem.rules.mechanism,
            training,
            channel,
            work,
            state.slots,
            seeded_noise(0, 1),  # type: ignore[arg-type]
        )

    return reduction, replace(replies, slots=broken), state.buffers


def with_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("compression", [None, "balanced"], ids=["plain", "balanced"])
@pytest.mark.parametrize("name", METHODS)
def test_no_client_changes_the_sum_of_any_method_by_more_than_the_clip(name, compression):
    """All slots and buffers together, for each client of unequal size, with and without codecs; NaN adds nothing."""
    model = with_statistics() if compression is None else make_model()
    reduction, replies, _ = a_round(name, compression, model)
    clip, changes = 1e-5, []
    whole = reduction()
    whole.add(replies.slots, replies.buffers)
    for left_out in range(len(replies.clients)):
        some = replies.rows(torch.nonzero(replies.clients != left_out)[:, 0])
        others = reduction()
        others.add(some.slots, some.buffers)
        assert others.total.keys() == whole.total.keys()
        changes.append(norm({slot: whole.total[slot] - others.total[slot] for slot in whole.total}))
    assert changes[1] == 0
    assert all(change <= clip * (1 + 1e-12) for change in changes)
    assert any(change > clip * (1 - 1e-9) for change in changes), "the clip is tight, so the test can fail"
    slots, buffers = whole.release()
    assert all(torch.isfinite(value).all() for value in [*slots.values(), *buffers.values()])


def test_a_slot_with_one_number_for_each_tensor_gets_one_noise_for_each():
    reduction, replies, _ = a_round("fedadamw", None, make_model())
    private = reduction()
    private.add(replies.slots, replies.buffers)
    slots, _ = private.release()
    sizes = [p.numel() for p in make_model().parameters()]
    assert private.total["v"].shape == (len(sizes),)
    for values in torch.split(slots.v, sizes):
        assert (values == values[0]).all()


def test_one_by_one_or_all_at_once_the_sum_is_the_same():
    reduction, replies, _ = a_round("scaffold", None, with_statistics())
    whole, single = reduction(), reduction()
    whole.add(replies.slots, replies.buffers)
    for row in range(len(replies.clients)):
        one = replies.rows(torch.tensor([row]))
        single.add(one.slots, one.buffers)
    for slot in whole.total:
        torch.testing.assert_close(single.total[slot], whole.total[slot], rtol=1e-13, atol=1e-15)


def test_noised_buffers_keep_whole_numbers_and_variances_above_zero():
    reduction, replies, before = a_round("fedavg", None, with_statistics())
    private = reduction()
    private.add(replies.slots, replies.buffers)
    _, buffers = private.release()
    assert torch.equal(buffers["1.num_batches_tracked"], before["1.num_batches_tracked"])
    assert (buffers["1.running_var"] >= 0).all()
    assert not torch.equal(buffers["1.running_mean"], before["1.running_mean"])
