"""The batch plan and the counter-based bits behind it."""

from __future__ import annotations

import hashlib
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr.data import batches as batches_module
from fedlalr.data.batches import PADDING, batch_counts, batches_per_pass, plan
from fedlalr.data.random import bits, key

sizes_of_clients = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(sizes=sizes_of_clients, batch_size=st.integers(1, 12), epochs=st.integers(1, 3), seed=st.integers(0, 2**40))
def test_every_pass_shows_every_sample_once(sizes, batch_size, epochs, seed):
    size = torch.tensor(sizes)
    per_pass = batches_per_pass(size, batch_size)
    batches = plan(seed, 3, torch.arange(len(sizes)), size, per_pass * epochs, batch_size)
    for row, n in enumerate(sizes):
        steps = int(per_pass[row])
        for epoch in range(epochs):
            shown = batches[row, epoch * steps : (epoch + 1) * steps].flatten()
            assert sorted(shown[shown != PADDING].tolist()) == list(range(n))
        assert (batches[row, steps * epochs :] == PADDING).all()


@settings(deadline=None, max_examples=60)
@given(
    sizes=sizes_of_clients,
    batch_size=st.one_of(st.none(), st.integers(1, 12)),
    steps=st.integers(1, 9),
    small=st.sampled_from([0, batches_module.SMALL_SHUFFLE]),
)
def test_a_clients_batches_do_not_depend_on_who_else_is_asked_for(sizes, batch_size, steps, small):
    size, ids = torch.tensor(sizes), torch.arange(len(sizes)) * 7
    with mock.patch.object(batches_module, "SMALL_SHUFFLE", small):
        together = plan(5, 2, ids, size, torch.full_like(size, steps), batch_size)
    for row in range(len(sizes)):
        alone = plan(5, 2, ids[row : row + 1], size[row : row + 1], torch.tensor([steps]), batch_size)[0]
        mine = together[row]
        for k in range(steps):
            assert mine[k][mine[k] != PADDING].tolist() == alone[k][alone[k] != PADDING].tolist()


def uneven(small: int, large: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, sizes and steps of one tiny client among large ones."""
    sizes = torch.tensor([large, large, small, *[large] * 7])
    return torch.arange(10) * 3, sizes, torch.full_like(sizes, 100)


def test_a_tiny_client_is_not_shuffled_at_the_size_of_the_largest(monkeypatch):
    shuffled, shuffle = [], batches_module._shuffles

    def counted(*arguments):
        shuffled.append(shuffle(*arguments))
        return shuffled[-1]

    monkeypatch.setattr(batches_module, "_shuffles", counted)
    ids, sizes, steps = uneven(1, 20_000)
    plan(0, 1, ids, sizes, steps, 50)
    assert sum(order.numel() for order in shuffled) == 100 * 1 + 9 * 20_000


def test_the_plan_of_uneven_clients_is_the_one_of_earlier_versions():
    batches = plan(3, 2, *uneven(3, 20_000), 50)
    assert batches.shape == (10, 100, 50)
    assert batches[2, :3, :3].tolist() == [[0, 2, 1], [1, 2, 0], [1, 0, 2]]
    assert batches[0, 0, :4].tolist() == [12801, 14766, 3123, 809]
    assert hashlib.sha256(batches.numpy().tobytes()).hexdigest()[:16] == "64416351c9436734"


@settings(deadline=None, max_examples=100)
@given(
    clients=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=6),
    batch_size=st.one_of(st.none(), st.integers(1, 40)),
    drop_last=st.booleans(),
)
def test_the_counts_of_batches_are_those_of_the_plan(clients, batch_size, drop_last):
    sizes, steps = torch.tensor(clients).T.contiguous()
    planned = plan(1, 1, torch.arange(len(sizes)), sizes, steps, batch_size, drop_last)
    counted = batch_counts(sizes, steps, batch_size, drop_last)
    assert torch.equal(counted, (planned != PADDING).sum(-1))


def test_the_order_changes_with_seed_round_client_and_pass():
    def order(seed=0, round=1, client=0):
        size = torch.tensor([50])
        return plan(seed, round, torch.tensor([client]), size, torch.tensor([2]), None)[0]

    base = order()
    for other in (order(seed=1), order(round=2), order(client=1)):
        assert not torch.equal(base, other)
    assert not torch.equal(base[0], base[1])
    assert torch.equal(base, order())


def test_the_last_smaller_batch_is_kept_or_dropped():
    size, ids = torch.tensor([7, 2]), torch.tensor([0, 1])
    kept = plan(0, 1, ids, size, batches_per_pass(size, 3), 3)
    assert (kept[0] != PADDING).sum(1).tolist() == [3, 3, 1]
    dropped = plan(0, 1, ids, size, batches_per_pass(size, 3, drop_last=True), 3, drop_last=True)
    assert (dropped[0] != PADDING).sum(1).tolist() == [3, 3]
    assert (dropped[1] != PADDING).sum(1).tolist() == [2, 0]  # less than a batch: its short one is kept


def test_a_shuffle_is_uniform_over_permutations():
    """All 24 orders of four samples over many rounds, by a chi-squared test at a fixed seed."""
    counts: dict[tuple[int, ...], int] = {}
    for t in range(1, 2401):
        order = tuple(plan(0, t, torch.tensor([0]), torch.tensor([4]), torch.tensor([1]), None)[0, 0].tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((count - 100) ** 2 / 100 for count in counts.values()) < 49.7  # 0.999 quantile, 23 degrees of freedom


def test_bits_fold_integers_and_tensors_alike():
    counters = torch.tensor([0, 5, 2**40])
    assert bits(key(1, 2), 3, counters).tolist() == bits(key(1, 2, 3), counters).tolist()
    assert [int(b) for b in bits(key(1), counters)] == [(key(1, int(c)) % 2**64) >> 1 for c in counters]


def test_bits_are_not_negative_and_balanced():
    drawn = bits(key(9), torch.arange(20000))
    assert (drawn >= 0).all()
    ones = torch.stack([(drawn >> place) & 1 for place in range(63)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 0.02


def test_bits_need_a_tensor():
    with pytest.raises(TypeError, match="at least one tensor"):
        bits(key(1), 2)
