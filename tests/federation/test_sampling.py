"""`sampling=`: which clients take part in a round."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.config import ConfigError, load
from fedlalr.federation.sampling import draw_cohort, sample
from fedlalr.training.engines.reference import ReferenceEngine

KINDS = ("uniform", "size", "round-robin")


def run(sampling, rounds=4, count=2, **options):
    """Cohorts of a run, as its engine sees them."""
    drawn = []

    def engine(training):
        class Watched(ReferenceEngine):
            def train(self, work):
                drawn.append(work.clients.tolist())
                return super().train(work)

        return Watched(training)

    fl.run(
        make_model(), make_clients(), fl.FedAvg(0.1), rounds=rounds, clients_per_round=count, sampling=sampling,
        engine=engine, **options,
    )  # fmt: skip
    return drawn


@pytest.mark.parametrize("kind", KINDS)
def test_a_cohort_is_a_function_of_the_seed_and_has_no_client_twice(kind):
    sizes = torch.arange(21, 51)
    for seed in (3, b"a secret"):
        drawn = [draw_cohort(kind, sizes, 7, seed, t).tolist() for t in range(1, 40)]
        assert all(len(set(cohort)) == 7 and cohort == sorted(cohort) for cohort in drawn)
        assert drawn == [draw_cohort(kind, sizes, 7, seed, t).tolist() for t in range(1, 40)]
        assert {client for cohort in drawn for client in cohort} == set(range(30))
    assert draw_cohort(kind, sizes, 7, 3, 1).tolist() != draw_cohort(kind, sizes, 7, 4, 1).tolist()
    assert draw_cohort(kind, sizes, 30, 3, 1).tolist() == list(range(30))


def test_uniform_cohorts_are_those_of_earlier_versions():
    assert draw_cohort("uniform", torch.ones(100), 5, 0, 1).tolist() == sample(100, 5, 0, 1).tolist()
    assert sample(100, 5, seed=0, round=1).tolist() == [1, 19, 22, 57, 80]
    assert run("uniform") == [sample(5, 2, 0, t).tolist() for t in (1, 2, 3, 4)]


def test_by_size_a_client_is_drawn_in_proportion_to_its_samples():
    sizes = torch.tensor([10, 20, 30, 40])
    drawn = [int(draw_cohort("size", sizes, 1, 0, t)) for t in range(1, 2001)]
    shares = np.bincount(drawn, minlength=4) / 2000
    # a binomial share has a deviation of at most 0.011; beyond 0.06 with probability < 1e-6
    assert np.abs(shares - sizes.numpy() / 100).max() < 0.06


def test_in_turn_every_client_takes_part_equally_often():
    drawn = run("round-robin", rounds=10, count=2)
    assert sorted(client for cohort in drawn for client in cohort) == sorted([0, 1, 2, 3, 4] * 4)
    for one, following in pairwise(drawn):
        assert not set(one) & set(following)  # five clients, two at a time: none two rounds running


def test_a_function_chooses_the_clients():
    asked = []

    def oldest_first(round, population, count, generator):
        asked.append((round, population, count, generator.integers(1000)))
        return np.arange(population)[::-1][:count]

    assert run(oldest_first, rounds=2, count=3) == [[2, 3, 4], [2, 3, 4]]
    assert [each[:3] for each in asked] == [(1, 5, 3), (2, 5, 3)]
    assert asked[0][3] != asked[1][3]
    before = list(asked)
    run(oldest_first, rounds=2, count=3)
    assert asked[2:] == before  # its generator depends on nothing but the seed and the round


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([0, 1, 2], "3 clients, but clients_per_round is 2"),
        ([0, 5], "numbered from 0 to 4"),
        ([-1, 0], "numbered from 0 to 4"),
        ([3, 3], "only once"),
        ([0.0, 1.0], "a list of integers"),
        ([[0, 1]], "a list of integers"),
        ([[0], [1, 2]], "must return 2 client numbers"),
        (None, "a list of integers"),
        ([True, False], "a list of integers"),
    ],
)
def test_what_a_function_returns_is_checked(returned, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run(lambda *_: returned)


@pytest.mark.parametrize(("sampling", "message"), [("sizes", "Did you mean 'size'"), (3, "a name or a function")])
def test_another_sampling_is_rejected(sampling, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run(sampling)


def test_a_run_resumes_only_with_the_same_sampling(tmp_path):
    whole = run("size", rounds=4)
    first = run("size", rounds=2, run_dir=tmp_path)
    assert first + run("size", rounds=4, run_dir=tmp_path, resume=True) == whole
    with pytest.raises(fl.RunDirectoryError, match="sampling was 'size' and is now 'uniform'"):
        run("uniform", rounds=5, run_dir=tmp_path, resume=True)


def test_a_configuration_names_the_sampling():
    assert load("quickstart").sampling == "uniform"
    assert load("quickstart", ["sampling=round-robin"]).sampling == "round-robin"
    with pytest.raises(ConfigError, match="sampling cannot be 'sizes'; choose one of uniform, size, round-robin"):
        load("quickstart", ["sampling=sizes"])
