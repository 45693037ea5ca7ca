"""Asynchronous updates, over-selection and deadlines on Flower: the simulator's arithmetic, whatever arrives when."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Error, Message, MetricRecord
from flwr.common.constant import ErrorCode

import fedlalr as fl
from conftest import make_clients
from fedlalr.flower.client import training
from flower import federation
from flower.federation import PAIRS, POPULATION, InProcessGrid, cohorts, nodes, same, simulated, strategy, with_buffers
from flower.in_process import Node

LALR = fl.FedLALR(lr=0.05)
ALL = {"asynchronous": {"buffer": 2, "concurrency": POPULATION}, "rounds": 7, "local": fl.Steps(2)}


def started(algorithm, folder, settings, make=None, **options):
    given = {} if make is None else {"make": make}
    server = strategy(algorithm, settings=settings, deadline=60, join_deadline=60, **given, **options)
    return server, InProcessGrid(nodes(algorithm, folder, settings=settings, **given))


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        (LALR, {}),
        (fl.FedAMS(), {"weighting": "samples", "asynchronous": {**ALL["asynchronous"], "delay_threshold": 1}}),
        (LALR, {"compression": "balanced"}),
        (fl.FedAvg(0.1), {"personal": "2.*"}),
    ],
    ids=["FedLALR", "FedAMS", "compression", "personal"],
)
def test_replies_that_arrive_together_give_the_simulators_bits(algorithm, more, tmp_path):
    """All replies are there at once, as those of equal speeds are in the simulator; later updates are stale."""
    settings = ALL | more
    server, grid = started(algorithm, tmp_path, settings)
    server.start(grid)
    wanted = simulated(algorithm, settings=settings)
    assert same(server.result, wanted)
    assert [r.staleness for r in server.result.history] == [r.staleness for r in wanted.history]
    assert max(r.staleness for r in wanted.history) >= 1


def test_buffers_are_averaged_and_counts_grow(tmp_path):
    settings = ALL | {"drop_last": True}  # one sample has no variance
    server, grid = started(LALR, tmp_path, settings, with_buffers)
    server.start(grid)
    assert same(server.result, simulated(LALR, with_buffers, settings))
    assert int(dict(server.result.model.named_buffers())["1.num_batches_tracked"]) == 14


def test_at_most_the_allowed_number_trains_and_no_client_twice_from_a_version(tmp_path):
    settings = ALL | {"asynchronous": {"buffer": 1, "concurrency": 3}}
    server, grid = started(LALR, tmp_path, settings)
    server.start(grid)
    by_version = cohorts(grid)
    assert len(by_version[1]) == 3
    assert all(len(clients) == len(set(clients)) <= 3 for clients in by_version.values())
    assert sum(map(len, by_version.values())) <= 3 + 7
    assert [record.clients for record in server.result.history] == [1] * 7


def test_a_node_that_does_not_reply_holds_nobody_up(tmp_path):
    server, grid = started(LALR, tmp_path, ALL)
    silent = next(iter(grid.nodes))
    grid.nodes[silent] = Node(**vars(grid.nodes[silent]) | {"tamper": lambda message, reply: None})
    server.start(grid)
    assert grid.trained.count(silent) == 1  # it still has its first message
    assert [record.clients for record in server.result.history] == [2] * 7
    assert not any(record.rejected for record in server.result.history)


def test_a_node_that_passes_the_deadline_is_rejected_and_may_start_again(tmp_path):
    server, grid = started(LALR, tmp_path, ALL | {"asynchronous": {"buffer": 5, "concurrency": 5}, "rounds": 3})
    server.deadline = server._rounds.deadline = 0.05
    silent = next(iter(grid.nodes))
    client = int(grid.nodes[silent].config["partition-id"])
    grid.nodes[silent] = Node(**vars(grid.nodes[silent]) | {"tamper": lambda message, reply: None})
    server.start(grid)
    assert [record.clients for record in server.result.history] == [4] * 3
    for record in server.result.history:
        assert record.rejected == (fl.Rejection(client, "no reply within the deadline of 0.05 s"),)
    assert grid.trained.count(silent) == 3


def spoilt(message: Message, reply: Message) -> Message:
    for record in reply.content.array_records.values():
        for name, array in record.items():
            values = array.numpy()
            record[name] = type(array)(values * math.nan if values.dtype.kind == "f" else values)
    return reply


def test_replies_that_cannot_be_used_do_not_fill_the_buffer(tmp_path):
    server, grid = started(LALR, tmp_path, ALL)
    bad = next(iter(grid.nodes))
    client = int(grid.nodes[bad].config["partition-id"])
    grid.nodes[bad] = Node(**vars(grid.nodes[bad]) | {"tamper": spoilt})
    server.start(grid)
    rejected = [rejection for record in server.result.history for rejection in record.rejected]
    assert {(one.client, one.reason) for one in rejected} == {(client, "x is not finite")}
    assert [record.clients for record in server.result.history] == [2] * 7
    assert all(torch.isfinite(value).all() for value in server.result.state["x"].values())


@pytest.mark.parametrize("buffer", [2, POPULATION], ids=["two", "everyone"])
@pytest.mark.filterwarnings("ignore::fedlalr.RepliesRejected")
def test_replies_that_cannot_be_used_are_treated_as_in_the_simulator(tmp_path, monkeypatch, buffer):
    """The third client's samples are not finite: the same replies, bits and rejections in every update."""
    pairs = [(inputs * math.nan, targets) if k == 2 else (inputs, targets) for k, (inputs, targets) in enumerate(PAIRS)]
    monkeypatch.setattr(federation, "PAIRS", pairs)
    settings = ALL | {"asynchronous": {"buffer": buffer, "concurrency": POPULATION}}
    server, grid = started(LALR, tmp_path, settings)
    server.start(grid)
    wanted = simulated(LALR, settings=settings)
    assert same(server.result, wanted)
    rejected = [record.rejected for record in wanted.history]
    assert [record.rejected for record in server.result.history] == rejected
    assert [client for each in rejected for client, _ in each].count(2) >= 2
    assert {record.clients for record in wanted.history} == {min(buffer, POPULATION - 1)}


def test_a_node_that_fails_takes_nobodys_place(tmp_path):
    server, grid = started(LALR, tmp_path, ALL)
    broken = next(iter(grid.nodes))
    client = int(grid.nodes[broken].config["partition-id"])
    failed = Error(ErrorCode.CLIENT_APP_CRASHED, "out of memory")
    tampered = {"tamper": lambda message, reply: Message(failed, reply_to=message)}
    grid.nodes[broken] = Node(**vars(grid.nodes[broken]) | tampered)
    server.start(grid)
    rejected = {rejection for record in server.result.history for rejection in record.rejected}
    assert rejected == {fl.Rejection(client, "its client app's process died: out of memory")}
    assert [record.clients for record in server.result.history] == [2] * 7


def test_without_usable_replies_an_update_fails(tmp_path):
    server, grid = started(LALR, tmp_path, ALL)
    grid.nodes = {node: Node(**vars(each) | {"tamper": spoilt}) for node, each in grid.nodes.items()}
    with pytest.raises(fl.RoundFailed, match=r"round 1: 0 usable replies.*5 clients .*x is not finite"):
        server.start(grid)


def test_a_run_resumes_after_its_last_update(tmp_path):
    for rounds in (2, 5):
        settings = ALL | {"rounds": rounds, "run_dir": str(tmp_path / "run"), "resume": True, "personal": "2.*"}
        server, grid = started(LALR, tmp_path / "nodes", settings)
        server.start(grid)
    assert [record.round for record in server.result.history] == [1, 2, 3, 4, 5]
    assert len(cohorts(grid)[3]) == POPULATION  # everyone starts again from the version that is resumed


class Timed(Dataset):
    """A client's samples. Reading a batch of four takes 1 / speed seconds on a clock of its own."""

    now = 0.0

    def __init__(self, pair, speed):
        self.pair, self.speed = pair, speed

    def __len__(self):
        return len(self.pair[1])

    def __getitem__(self, index):
        Timed.now += 1 / (4 * self.speed)
        return self.pair[0][index], self.pair[1][index]


@pytest.mark.parametrize("algorithm", [fl.FedNova(0.1), LALR, fl.SCAFFOLD(0.1)], ids=["FedNova", "FedLALR", "SCAFFOLD"])
def test_a_client_that_runs_out_of_time_sends_what_it_has(algorithm, tmp_path, monkeypatch):
    """With two seconds, the clients finish 1, 2, 4, 4 and 4 of their 4 local steps; the last one has time left."""
    speeds = [0.5, 1.0, 2.0, 2.0, 16.0]
    pairs = [Timed(pair, speed) for pair, speed in zip(make_clients((8,) * POPULATION), speeds, strict=True)]
    monkeypatch.setattr(federation, "PAIRS", pairs)
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: Timed.now))
    settings = {"stragglers": {"deadline": 2}, "local": fl.Steps(4), "batch_size": 4, "rounds": 3}
    server, grid = started(algorithm, tmp_path, settings)
    steps = []
    for node in grid.nodes.values():
        node.tamper = lambda message, reply: steps.append(reply.content["metrics"]["steps"]) or reply
    server.start(grid)
    assert steps == [1, 2, 4, 4, 4] * 3
    assert [(record.clients, record.rejected) for record in server.result.history] == [(POPULATION, ())] * 3
    assert same(server.result, simulated(algorithm, settings=settings | {"speeds": speeds}))


@pytest.mark.parametrize(
    ("stragglers", "claimed", "said"),
    [
        ({"deadline": 30}, 5, "steps is 5, but a client with 8 samples takes at most 4 in this round"),
        ({"deadline": 30}, 0, "steps is 0, but a whole number from 1"),
        (None, 3, "steps is 3, but a client with 8 samples takes 4 in this round"),
        ({"oversample": 0.0}, 3, "steps is 3, but a client with 8 samples takes 4 in this round"),
    ],
)
def test_fewer_local_steps_are_accepted_only_if_the_run_has_a_deadline(
    stragglers, claimed, said, tmp_path, monkeypatch
):
    monkeypatch.setattr(federation, "PAIRS", make_clients((8,) * POPULATION))
    settings = {"stragglers": stragglers, "local": fl.Steps(4), "batch_size": 4, "rounds": 1}
    server, grid = started(LALR, tmp_path, settings)

    def claim(message, reply):
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "steps": claimed})
        return reply

    list(grid.nodes.values())[3].tamper = claim
    server.start(grid)
    ((client, reason),) = server.result.history[0].rejected
    assert client == 3
    assert said in reason


def test_a_round_that_ends_before_its_clients_is_rejected():
    settings = {"stragglers": {"deadline": 60}}
    with pytest.raises(ValueError, match=r"may train for 60 s, the deadline of stragglers, but .* only for 60 s"):
        strategy(LALR, settings=settings, deadline=60.0)
    server = strategy(LALR, settings=settings, deadline=61.0)
    with pytest.raises(ValueError, match="only for 5 s, the deadline of the strategy; make that one longer"):
        server.start(InProcessGrid({}), timeout=5.0)


def test_the_first_replies_of_more_clients_are_taken(tmp_path):
    """The slowest of five are not waited for, and are no rejected clients."""
    settings = {"clients_per_round": 3, "stragglers": {"oversample": 0.6}, "rounds": 3}
    server, grid = started(LALR, tmp_path, settings)
    slow = list(grid.nodes)[:2]
    for node in slow:
        grid.nodes[node] = Node(**vars(grid.nodes[node]) | {"tamper": lambda message, reply: None})
    server.start(grid)
    assert {len(clients) for clients in cohorts(grid).values()} == {5}
    for record in server.result.history:
        assert (record.clients, record.rejected) == (3, ())
        assert record.bytes_down * 3 == record.bytes_up * 5
