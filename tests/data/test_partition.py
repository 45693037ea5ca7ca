"""Partitions: what every scheme promises, and that the equal-size Dirichlet scheme has the distribution of its rule."""

from __future__ import annotations

import pickle
from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedlalr.data import schemes
from fedlalr.data.heterogeneity import count_labels, summarise
from fedlalr.data.partition import Partition, partition
from fedlalr.data.population import Population

PLAIN = ("dirichlet", "dirichlet-classes", "iid", "lognormal")


@st.composite
def problems(draw: st.DrawFn) -> tuple[NDArray[np.int64], int, int]:
    """Labels of uneven classes, a number of clients they can feed, a seed."""
    counts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=12))
    labels = np.repeat(np.arange(len(counts)), counts)
    seed = draw(st.integers(0, 2**32))
    return np.random.default_rng(seed).permutation(labels), draw(st.integers(1, len(labels))), seed


alphas = st.sampled_from((1e-100, 1e-3, 0.01, 0.3, 1.0, 100.0, 1e12))
quick = settings(deadline=None, max_examples=60)


def spread(scheme: str, alpha: float, labels: NDArray[np.int64], clients: int, seeds: int) -> float:
    """Mean entropy of the clients' label mixes."""
    parts = (partition(labels, clients, scheme, alpha=alpha, seed=seed) for seed in range(seeds))
    return float(np.mean([summarise(count_labels(labels, part)).entropy for part in parts]))


@quick
@given(problems(), st.sampled_from(PLAIN), alphas)
def test_every_sample_is_dealt_to_exactly_one_client(problem, scheme, alpha):
    labels, clients, seed = problem
    parts = partition(labels, clients, scheme, alpha=alpha, seed=seed)
    assert len(parts) == clients
    assert np.array_equal(np.sort(parts.indices), np.arange(len(labels)))
    assert np.array_equal(parts.sizes, [len(part) for part in parts])


@quick
@given(problems(), st.sampled_from(("dirichlet", "iid")), alphas)
def test_equal_size_schemes_differ_by_one_sample_at_most(problem, scheme, alpha):
    labels, clients, seed = problem
    sizes = partition(labels, clients, scheme, alpha=alpha, seed=seed).sizes
    assert sizes.max() - sizes.min() == (len(labels) % clients > 0)


@quick
@given(problems(), st.sampled_from(PLAIN), alphas)
def test_the_same_seed_gives_the_same_partition(problem, scheme, alpha):
    labels, clients, seed = problem
    first, second = (partition(labels, clients, scheme, alpha=alpha, seed=seed) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("scheme", [*PLAIN, "shards"])
def test_another_seed_gives_another_partition(scheme):
    labels = np.arange(500) % 10
    assert partition(labels, 10, scheme, seed=0) != partition(labels, 10, scheme, seed=1)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(st.lists(st.integers(200, 2000), min_size=2, max_size=8), st.integers(2, 10), st.integers(0, 1000))
def test_a_large_alpha_tends_to_the_global_mix(counts, clients, seed):
    labels = np.repeat(np.arange(len(counts)), counts)
    for scheme in ("dirichlet", "dirichlet-classes"):
        parts = partition(labels, clients, scheme, alpha=1e9, seed=seed)
        # The noise of drawing that many samples from the global mix is about half of this.
        noise = np.sqrt(len(counts) * clients / len(labels))
        assert summarise(count_labels(labels, parts)).total_variation < noise


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet-classes"])
@settings(deadline=None, max_examples=8, derandomize=True)
@given(classes=st.integers(3, 12), clients=st.integers(20, 40))
def test_a_smaller_alpha_never_spreads_classes_more_evenly_on_average(scheme, classes, clients):
    labels = np.arange(1500) % classes
    entropies = [spread(scheme, alpha, labels, clients, seeds=10) for alpha in (0.01, 0.1, 0.3, 1.0, 5.0)]
    assert entropies == sorted(entropies)


@pytest.mark.parametrize(("alpha", "present"), [(0.6, 9.3), (0.3, 8.0)])
def test_classes_per_client_on_cifar10_are_those_of_the_sequential_rule(alpha, present):
    labels = np.arange(50_000) % 10
    parts = [partition(labels, 100, "dirichlet", alpha=alpha, seed=seed) for seed in range(5)]
    means = [summarise(count_labels(labels, part)).classes_per_client for part in parts]
    assert np.mean(means) == pytest.approx(present, abs=0.3)


def exact_law(prior: NDArray[np.float64], counts: NDArray[np.int64], sizes: NDArray[np.int64]) -> dict[tuple, float]:
    """The probability of every client × class table under the rule, by following every draw."""

    @lru_cache(None)
    def after(flat: tuple[int, ...]) -> dict[tuple, float]:
        table = np.array(flat).reshape(prior.shape)
        left, room = counts - table.sum(axis=0), sizes - table.sum(axis=1)
        if not room.any():
            return {flat: 1.0}
        law: Counter = Counter()
        for client in np.flatnonzero(room):
            weights = prior[client] * (left > 0)
            for label in np.flatnonzero(weights):
                following = table.copy()
                following[client, label] += 1
                for end, probability in after(tuple(following.ravel())).items():
                    law[end] += probability * weights[label] / weights.sum() / (room > 0).sum()
        return law

    return after((0,) * prior.size)


def test_dealing_by_priors_has_the_exact_law_of_the_sequential_rule():
    classes = np.array([0, 0, 0, 1, 1, 1, 2])
    prior = np.array([[0.8, 0.15, 0.05], [0.1, 0.2, 0.7], [0.3, 0.4, 0.3]])
    law = exact_law(prior, np.bincount(classes), np.array([3, 2, 2]))
    rng, runs, seen = np.random.default_rng(1), 6000, Counter()
    for _ in range(runs):
        table = np.zeros(prior.shape, int)
        np.add.at(table, (schemes.deal_by_priors(classes, np.log(prior), rng), classes), 1)
        seen[tuple(table.ravel())] += 1
    assert set(seen) <= set(law)
    chi_squared = sum((seen[end] - runs * p) ** 2 / (runs * p) for end, p in law.items())
    # 18 degrees of freedom: one in a thousand exceeds 42.3.
    assert len(law) == 19
    assert chi_squared < 42.3


def test_blocks_that_end_early_deal_out_every_class(monkeypatch):
    monkeypatch.setattr(schemes, "_BLOCKS", (7, 7))
    labels = np.arange(600) % 6
    parts = partition(labels, 5, "dirichlet", alpha=0.05, seed=3)
    assert np.array_equal(count_labels(labels, parts).sum(axis=0), [100] * 6)


def test_cifar100_with_tiny_alpha_and_500_clients_ends():
    labels = np.arange(50_000) % 100
    parts = partition(labels, 500, "dirichlet", alpha=0.01)
    assert set(parts.sizes.tolist()) == {100}
    assert summarise(count_labels(labels, parts)).classes_per_client < 10


@quick
@given(problems(), st.sampled_from(("dirichlet-classes", "lognormal")), alphas, st.integers(0, 5))
def test_min_size_is_kept_at_any_alpha(problem, scheme, alpha, min_size):
    labels, clients, seed = problem
    min_size = min(min_size, len(labels) // clients)
    parts = partition(labels, clients, scheme, alpha=alpha, seed=seed, min_size=min_size)
    assert parts.sizes.min() >= min_size


@quick
@given(problems(), st.integers(1, 5))
def test_shards_give_every_client_exactly_k_classes_or_say_why_not(problem, k):
    labels, clients, seed = problem
    counts = np.bincount(labels)
    possible = k <= len(counts) <= clients * k <= np.minimum(counts, clients).sum()
    if not possible:
        with pytest.raises(ValueError, match="classes_per_client"):
            partition(labels, clients, "shards", seed=seed, classes_per_client=k)
        return
    parts = partition(labels, clients, "shards", seed=seed, classes_per_client=k)
    assert np.array_equal(np.sort(parts.indices), np.arange(len(labels)))
    assert ((count_labels(labels, parts) > 0).sum(axis=1) == k).all()


def test_shards_of_even_classes_have_even_sizes():
    parts = partition(np.arange(6000) % 10, 100, "shards", classes_per_client=2)
    assert set(parts.sizes.tolist()) == {60}


def test_shards_hold_large_classes_more_often():
    labels = np.repeat([0, 1, 2, 3], [700, 100, 100, 100])
    counts = count_labels(labels, partition(labels, 20, "shards", classes_per_client=2))
    assert (counts > 0).sum(axis=0).tolist() == [20, 7, 7, 6]


def test_lognormal_sizes_have_the_spread_asked_for():
    labels = np.zeros(1_000_000, int)
    for sigma in (0.0, 0.5, 1.5):
        sizes = partition(labels, 2000, "lognormal", sigma=sigma, min_size=0).sizes
        assert np.std(np.log(np.maximum(sizes, 1))) == pytest.approx(sigma, abs=0.08)


def test_natural_makes_a_client_of_every_id_and_keeps_the_order():
    parts = partition([0, 1, 0, 1, 1], scheme="natural", ids=["romeo", "juliet", "romeo", "nurse", "juliet"])
    assert [part.tolist() for part in parts] == [[1, 4], [3], [0, 2]]


def test_labels_may_be_tensors_lists_or_any_whole_numbers():
    plain = partition(np.arange(60) % 3, 4, seed=5)
    assert partition(torch.arange(60) % 3, 4, seed=5) == plain
    assert partition([(i % 3) * 10 - 7 for i in range(60)], 4, seed=5) == plain


def test_a_client_is_a_view_and_a_slice_is_a_partition():
    parts = partition(np.arange(30) % 3, 5, "iid")
    assert np.shares_memory(parts[2], parts.indices)
    assert np.array_equal(parts[-1], parts[4])
    assert [part.tolist() for part in parts[1:4]] == [parts[i].tolist() for i in (1, 2, 3)]
    with pytest.raises(IndexError, match="no client 5"):
        parts[5]


def test_a_million_clients_are_two_arrays():
    parts = partition(np.zeros(1_000_000, int), 1_000_000, "iid")
    assert vars(parts).keys() == {"indices", "offsets"}
    assert parts.indices.nbytes + parts.offsets.nbytes < 17_000_000
    assert parts[999_999].shape == (1,)


def test_a_partition_says_what_it_holds():
    assert repr(partition(np.zeros(10, int), 4, "iid")) == "Partition(10 samples, 4 clients of 2 to 3)"
    assert repr(Partition.from_lists([])) == "Partition(0 samples, 0 clients)"


def test_owners_that_are_no_clients_are_refused():
    with pytest.raises(ValueError, match="clients 0 to 2"):
        Partition.from_owners([0, 3], clients=3)


def test_a_partition_survives_pickling():
    parts = partition(np.arange(30) % 3, 5)
    assert pickle.loads(pickle.dumps(parts)) == parts
    assert parts != list(parts)


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [([0, 1], [0, 1], "increase from 0"), ([0, 1], [0, 2, 1, 2], "increase from 0"), ([0.5], [0, 1], "whole numbers")],
)
def test_a_malformed_partition_is_refused(indices, offsets, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Partition(np.array(indices), np.array(offsets))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scheme": "dirchlet"}, "Did you mean 'dirichlet'"),
        ({"scheme": "dirichlet_classes"}, "Did you mean 'dirichlet-classes'"),
        ({"scheme": "zzz"}, "choose one of dirichlet, .*natural"),
        ({"alpha": 0.0}, "alpha must be a finite number"),
        ({"alpha": -1}, "alpha must be a finite number"),
        ({"alpha": float("nan")}, "alpha must be a finite number"),
        ({"alpha": float("inf")}, "alpha must be a finite number"),
        ({"alpha": "0.3"}, "alpha must be a number, not '0.3'"),
        ({"clients": 0}, "clients must be a whole number of at least 1"),
        ({"clients": 2.5}, "clients must be a whole number"),
        ({"clients": True}, "clients must be a whole number"),
        ({"clients": 31}, "31 clients cannot share 30 samples"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"labels": []}, "labels"),
        ({"labels": np.array([], dtype=int)}, "labels is empty"),
        ({"labels": []}, "labels is empty"),
        ({"labels": [[0, 1], [1, 0]]}, "one dimension"),
        ({"labels": [0.5, 1.5]}, "whole numbers.*; the schemes 'iid', 'lognormal' and 'natural' accept any targets"),
        ({"labels": ["cat", "dog"]}, r"convert names to numbers with numpy.unique\(labels, return_inverse=True\)"),
        ({"labels": 3, "scheme": "iid"}, "labels must have one value per sample, not 3"),
        ({"labels": [], "scheme": "iid"}, "labels is empty"),
        ({"min_size": 3}, "min_size is not used by the scheme 'dirichlet', only by 'dirichlet-classes' and"),
        ({"ids": [1] * 30}, "ids is not used"),
        ({"scheme": "dirichlet-classes", "min_size": 8}, "at most min_size=7"),
        ({"scheme": "dirichlet-classes", "min_size": -1}, "min_size must be a whole number of at least 0"),
        ({"scheme": "lognormal", "sigma": -0.1}, "sigma must be a finite number"),
        ({"scheme": "shards", "classes_per_client": 4}, "more than the number of classes, 3"),
        ({"scheme": "shards", "classes_per_client": 1, "clients": 2}, "at least classes_per_client=2"),
        ({"scheme": "natural", "clients": None}, "needs ids"),
        ({"scheme": "natural", "clients": None, "ids": [1, 2]}, "one value for each of the 30 samples"),
        ({"scheme": "natural", "clients": 3, "ids": [1, 2] * 15}, "there are 2 ids, not 3"),
        ({"scheme": "natural", "ids": [1.0, float("nan")] * 15}, r"ids has no value for sample 1 \(15 in total\)"),
        ({"scheme": "natural", "ids": np.array(["a", None] * 15, object)}, "no value for sample 1"),
        ({"scheme": "natural", "ids": ["a", float("nan")] * 15}, r"no value for sample 1 \(15 in total\)"),
        ({"scheme": "natural", "ids": np.array(["a", np.nan] * 15, object)}, "no value for sample 1"),
        ({"scheme": "natural", "ids": np.array(["a", 1] * 15, object)}, "all of one kind, such as all strings"),
    ],
)
def test_wrong_input_is_refused_with_what_to_do(arguments, message):
    arguments = {"labels": np.arange(30) % 3, "clients": 4, **arguments}
    with pytest.raises((ValueError, TypeError), match=message):
        partition(**arguments)


@pytest.mark.parametrize("scheme", ["iid", "lognormal"])
def test_schemes_that_only_count_samples_take_targets_of_any_kind(scheme):
    by_labels = partition(np.arange(30) % 3, 4, scheme)
    for targets in (np.linspace(0, 1, 30), np.zeros((30, 2)), ["rain"] * 30):
        assert partition(targets, 4, scheme) == by_labels
    assert partition(np.linspace(0, 1, 30), scheme="natural", ids=["a", "b"] * 15).sizes.tolist() == [15, 15]


def test_a_partition_of_ones_own_is_made_of_lists_as_the_refusal_says():
    inputs, targets, lists = torch.zeros(6, 2), torch.zeros(6), [[0, 1, 2], [3], [4, 5]]
    with pytest.raises(TypeError, match=r"not a list; .*fl.data.Partition.from_lists\(lists\)"):
        Population(inputs, targets, lists)
    assert Population(inputs, targets, Partition.from_lists(lists)).sizes.tolist() == [3, 1, 2]


@pytest.mark.parametrize("wrong", [np.array([True, False]), [0.5, 1.0], ["a", "b"], [[0, 1]]])
def test_what_is_no_index_is_refused_and_not_made_one(wrong):
    with pytest.raises(TypeError, match=r"the indices of client 1 must be whole numbers.*numpy.flatnonzero\(mask\)"):
        Partition.from_lists([[0, 1], wrong])
    with pytest.raises(TypeError, match=r"the owners of samples must be whole numbers.*ids=names"):
        Partition.from_owners(wrong, 2)
    assert Partition.from_lists([[], torch.tensor([1])]).sizes.tolist() == [0, 1]


def test_more_priors_than_memory_are_refused():
    with pytest.raises(ValueError, match="use fewer clients or coarser labels"):
        partition(np.arange(20_000), 20_000, "dirichlet")
