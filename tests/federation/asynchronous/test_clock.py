"""The virtual clock: who trains when, and which replies arrive together."""

import numpy as np
import pytest
import torch

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.data.population import as_clients
from fedlalr.federation.asynchronous.clock import Clock, Period
from fedlalr.federation.options import Options
from fedlalr.federation.problem import Problem
from fedlalr.federation.stragglers import client_speeds

UPDATES = 40


def clock(buffer: int, concurrency: int, population: int = 12, seed: int = 0, speeds: object = 1.0, **options) -> Clock:
    settings = {"local": fl.Steps(3), "batch_size": 4, "seed": seed, "speeds": speeds} | options
    chosen = Options(asynchronous=fl.Async(buffer, concurrency), **settings)
    clients = as_clients(make_clients(tuple(5 + k % 7 for k in range(population))), None, None)
    problem = Problem.of(make_model(), clients, fl.FedAvg(), chosen)
    return Clock(problem.training, chosen.sampling, chosen.asynchronous, problem.speeds)


CASES = [(1, 1), (1, 4), (3, 4), (4, 4), (3, 12), (12, 12), (5, 11)]


@pytest.mark.parametrize(("buffer", "concurrency"), CASES)
@pytest.mark.parametrize("speeds", [1.0, None])
def test_time_moves_on_and_no_client_trains_twice_at_once_or_twice_from_a_version(buffer, concurrency, speeds):
    """Followed from outside: who trains is what started and has not arrived."""
    given = clock(buffer, concurrency, speeds=speeds)
    training: dict[int, int] = {}
    now = 0.0
    for version in range(UPDATES):
        period = given.advance()
        started = period.started.tolist()
        assert started == sorted(set(started))
        assert len(period.arrived) == buffer
        times = [flight.arrives for flight in period.arrived]
        assert times == sorted(times)
        assert now <= times[0]
        assert times[-1] == pytest.approx(now + period.seconds)
        now = times[-1]
        for flight in period.arrived:
            if flight.version == version:
                assert flight.client in started
            else:
                assert training.pop(flight.client) == flight.version
        landed = {flight.client for flight in period.arrived if flight.version == version}
        for client in set(started) - landed:
            assert client not in training
            training[client] = version
        assert period.training == training.keys()
        assert len(training) < concurrency
        assert given.version == version


@pytest.mark.parametrize(("buffer", "concurrency"), CASES)
def test_at_no_instant_more_clients_train_than_allowed(buffer, concurrency):
    given, events = clock(buffer, concurrency), []
    speeds = client_speeds(1.0, 12, 0)
    for _ in range(UPDATES):
        for flight in given.advance().arrived:
            needed = 3 / float(speeds[flight.client])
            events += [(flight.arrives, -1), (flight.arrives - needed, 1)]
    events.sort(key=lambda event: (round(event[0], 9), event[1]))
    assert max(np.cumsum([change for _, change in events])) <= concurrency


def test_a_place_is_filled_as_soon_as_its_client_replies():
    """With enough free clients, as many train after each instant as are allowed."""
    given = clock(2, 5)
    starts = [len(given.advance().started) for _ in range(UPDATES)]
    assert starts[0] == 6  # five, and one for the first reply; the second one completes the update
    assert starts[1:] == [2] * (UPDATES - 1)


def same(first: Period, second: Period) -> bool:
    return torch.equal(first.started, second.started) and first[1:] == second[1:]


def test_the_clock_is_a_function_of_the_seed():
    runs = [[given.advance() for _ in range(UPDATES)] for given in (clock(3, 7), clock(3, 7), clock(3, 7, seed=1))]
    assert all(map(same, runs[0], runs[1]))
    assert not all(map(same, runs[0], runs[2]))


def test_a_longer_period_is_the_same_one_with_more_replies_and_is_replayed():
    """As if the second and the fifth update had waited for another one and another two replies."""
    given, whole, apart = clock(3, 7), clock(4, 7), clock(5, 7)
    first, second = given.advance(), given.extend(1)
    assert same(second, whole.advance())
    assert second.arrived[:3] == first.arrived
    assert same(given.extend(1), apart.advance())
    periods = [given.advance() for _ in range(3)] + [given.extend(2)]
    assert given.more == {0: 2, 3: 2}
    other = clock(3, 7)
    other.replay(4, given.more)
    assert other.more == given.more
    assert (other.now, other.version) == (given.now, given.version)
    assert len(periods[-1].arrived) == 5
    assert all(same(given.advance(), other.advance()) for _ in range(10))


def test_a_period_ends_when_nobody_is_left():
    """Each of the four clients trains once with the first version."""
    given = clock(2, 3, population=4)
    assert len(given.advance().arrived) == 2
    assert len(given.extend(10).arrived) == 4
    assert given.more == {0: 2}
    assert len(given.advance().arrived) == 2


def test_equal_speeds_give_the_cohorts_of_synchronous_rounds():
    given = clock(4, 4, speeds=None)
    options = Options(clients_per_round=4, local=fl.Steps(3), batch_size=4)
    clients = as_clients(make_clients(tuple(5 + k % 7 for k in range(12))), None, None)
    synchronous = Problem.of(make_model(), clients, fl.FedAvg(), options)
    for t in range(1, 10):
        period = given.advance()
        assert period.started.tolist() == synchronous.cohort(t, 0).tolist()
        assert [flight.client for flight in period.arrived] == period.started.tolist()
        assert period.seconds == 3.0


def test_replies_of_one_instant_are_received_before_anyone_starts():
    """Four equal clients and a buffer of two: two updates at each instant, the second with replies that are stale."""
    given = clock(2, 4, population=4, speeds=None)
    periods = [given.advance() for _ in range(4)]
    assert [len(period.started) for period in periods] == [4, 0, 4, 0]
    assert [period.seconds for period in periods] == [3.0, 0.0, 3.0, 0.0]
    assert [[flight.version for flight in period.arrived] for period in periods] == [[0, 0], [0, 0], [2, 2], [2, 2]]


def test_a_client_that_is_twice_as_fast_replies_twice_as_often():
    given = clock(2, 3, population=3, speeds=[1.0, 1.0, 2.0])
    replies = [flight.client for _ in range(90) for flight in given.advance().arrived]
    assert replies.count(2) > 1.4 * replies.count(0)  # not 2: it waits for an update before it starts again


@pytest.mark.parametrize("sampling", ["size", "round-robin", lambda t, n, k, random: random.permutation(n)[:k]])
def test_every_kind_of_sampling_reaches_every_client(sampling):
    given = clock(3, 5, sampling=sampling)
    assert {client for _ in range(80) for client in given.advance().started.tolist()} == set(range(12))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buffer": 0}, "buffer must be a whole number of at least 1"),
        ({"concurrency": 2.0}, "concurrency must be a whole number"),
        ({"buffer": 5, "concurrency": 4}, "buffer is 5, but only 4 clients train at the same time"),
        ({"staleness": -1}, "staleness must be a finite number of at least 0"),
        ({"delay_threshold": 0}, "delay_threshold must be a whole number of at least 1 or None"),
    ],
)
def test_invalid_settings_are_rejected(options, said):
    with pytest.raises(ValueError, match=said):
        fl.Async(**options)
