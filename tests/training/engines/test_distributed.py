"""The distributed engine: one, two and three ranks agree, only the first one writes, and one failure ends them all.

Three ranks run in `make test-slow`.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedlalr as fl
from closeness import TOLERANCE, difference
from fedlalr import config
from fedlalr.training.engines.distributed import shard
from fedlalr.training.ranks import Ranks, Spread
from training import rank_scenarios as scenarios

SHARED = ["same_results", "other_weights", "files", "first_rank_stops", "other_settings", "another_engine"]
SHARED += ["first_rank_fails"]
PLAN = {2: [*SHARED, "last_rank_fails", "last_rank_dies"], 3: SHARED}
"""Scenarios for every number of ranks."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict]]:
    """Gives the results of each of some ranks. One process starts them: its imports take seconds."""

    @cache
    def play(count: int) -> list[dict]:
        folder = tmp_path_factory.mktemp("ranks")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, scenarios.__file__, str(folder), str(count), json.dumps(PLAN[count])]
        subprocess.run(command, env=environment, timeout=240, check=True)
        return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(count)]

    return play


@pytest.fixture
def ranks(request: pytest.FixtureRequest, played: Callable[[int], list[dict]]) -> list[dict]:
    return played(request.param)


THREE = pytest.param(3, marks=pytest.mark.slow)
two = pytest.mark.parametrize("ranks", [2], indirect=True)
two_or_three = pytest.mark.parametrize("ranks", [2, THREE], indirect=True)
RUNS = [*((name, 2) for name in scenarios.JOBS)]
RUNS += [pytest.param(name, 3, marks=pytest.mark.slow) for name in scenarios.UNEVEN]
"""Three ranks run the jobs in which their number matters."""


def assert_same(given: dict, wanted: dict, tolerance: float = TOLERANCE) -> None:
    for slot, tensors in wanted["state"].items():
        for name, tensor in tensors.items():
            assert difference(given["state"][slot][name], tensor) <= tolerance, f"{slot} of {name}"
    for name, tensor in wanted["buffers"].items():
        assert difference(given["buffers"][name], tensor) <= tolerance, name
    for mine, right in zip(given["records"], wanted["records"], strict=True):
        *mine, metrics, rejected = mine
        *right, wanted_metrics, wanted_rejected = right
        assert (mine[:1], mine[2:3], mine[4:], rejected) == (right[:1], right[2:3], right[4:], wanted_rejected)
        assert (mine[1], mine[3]) == pytest.approx((right[1], right[3]), rel=tolerance, nan_ok=True)
        assert metrics == pytest.approx(wanted_metrics, rel=tolerance)
    for mine, right in zip(given["scores"], wanted["scores"], strict=True):
        assert mine == pytest.approx(right, rel=tolerance)


@pytest.mark.parametrize(("name", "ranks"), RUNS, indirect=["ranks"])
def test_any_number_of_ranks_gives_the_references_result(name, ranks):
    wanted = scenarios.outcome(scenarios.JOBS[name]("reference"))
    rejected = {client for record in wanted["records"] for client, _ in record[-1]}
    assert rejected == {"nan": {2}, "one sample": {4}}.get(name, set())
    for rank in ranks:
        assert_same(rank["same_results"][name], wanted)


@two_or_three
def test_ranks_that_stack_their_part_give_the_references_result(ranks):
    wanted = scenarios.outcome(scenarios.job("reference", model=scenarios.make_model()))
    for rank in ranks:
        assert_same(rank["same_results"]["stacked"], wanted, 1e-10)


@two_or_three
def test_the_first_rank_alone_is_watched_and_sees_the_probes_of_all(ranks):
    wanted = scenarios.outcome(scenarios.JOBS["median"]("reference"))["seen"]
    assert {trace.client for trace in wanted[1]} == {0, 5}
    first, *others = ranks
    seen = first["same_results"]["median"]["seen"]
    assert [seen[0], *seen[2:]] == [1, 2, 3]
    for mine, right in zip(seen[1], wanted[1], strict=True):
        assert mine[:2] == right[:2]
        assert mine.values == pytest.approx(right.values, rel=1e-10)
    assert all(other["same_results"]["median"]["seen"] == [] for other in others)


@two_or_three
def test_the_first_ranks_weights_count(ranks):
    wanted = scenarios.outcome(scenarios.job("reference"))
    for rank in ranks:
        assert_same(rank["other_weights"], wanted)


@two_or_three
def test_the_first_rank_alone_writes_and_a_run_resumes(ranks):
    wanted = scenarios.outcome(scenarios.job("reference", rounds=4))
    assert [rank["files"]["written"] for rank in ranks] == [True] + [False] * (len(ranks) - 1)
    assert_same(ranks[0]["files"], wanted)
    for other in ranks[1:]:
        assert_same(other["files"] | {"records": wanted["records"]}, wanted)


@two_or_three
def test_ranks_that_were_given_different_runs_are_rejected(ranks):
    for rank in ranks:
        assert rank["other_settings"] == (
            "ValueError: all ranks must be given the same run, but seed is 0 on rank 0 and 1 on rank 1"
        )


@two
def test_an_engine_that_would_run_everything_in_every_process_is_rejected(ranks):
    assert all("ValueError: torchrun started several processes" in rank["another_engine"] for rank in ranks)


@two_or_three
def test_an_observer_of_the_first_rank_ends_the_run_on_all(ranks):
    assert [rank["first_rank_stops"] for rank in ranks] == [2] * len(ranks)


@two_or_three
def test_a_failing_first_rank_fails_the_run_on_all_with_its_message(ranks):
    first, *others = ranks
    assert first["first_rank_fails"] == "OSError: the disk of the first rank is full"
    for other in others:
        assert other["first_rank_fails"] == "RankFailed: rank 0 failed: OSError: the disk of the first rank is full"


@two
def test_a_failing_last_rank_fails_the_run_on_all_with_its_message(ranks):
    assert ranks[1]["last_rank_fails"] == "ArithmeticError: this rank cannot evaluate"
    assert ranks[0]["last_rank_fails"] == "RankFailed: rank 1 failed: ArithmeticError: this rank cannot evaluate"


@two
def test_a_rank_that_dies_ends_the_run(ranks):
    assert "last_rank_dies" not in ranks[1]
    assert ranks[0]["last_rank_dies"].startswith("RankFailed: rank 0 lost the other ranks; one of them must have died")


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]  # a free port
    command = [*launcher, "-m", "fedlalr", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_torchrun_runs_the_command_line_and_the_first_process_alone_shows(tmp_path: Path):
    folder = tmp_path / "run"
    done = torchrun("run", "quickstart", "rounds=2", "--run-dir", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after 2 rounds") == 1
    assert "engine distributed (2 processes, each training" in done.stdout
    gone_on = torchrun("resume", str(folder), "rounds=3")
    assert gone_on.returncode == 0, gone_on.stderr
    assert gone_on.stdout.count("after 3 rounds") == 1
    assert [json.loads(line)["round"] for line in (folder / "metrics.jsonl").open()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("device", "second_moment"),
    [
        pytest.param("cpu", "max", marks=pytest.mark.slow),
        *(pytest.param("cuda", how, marks=pytest.mark.gpu) for how in ("mean", "max")),
    ],
)
def test_two_nodes_share_a_cohort_as_one_process_has_it(device: str, second_moment: str, tmp_path: Path):
    """Between GPUs through NCCL: it rejects a GPU that two processes of a machine share, but not one of two nodes.

    The environment is what `torchrun --nnodes 2 --nproc-per-node 1` gives each of its processes.
    """
    settings = ["rounds=3", f"device={device}", f"algorithm.second_moment={second_moment}"]
    right = config.execute(config.load("quickstart", [*settings, "engine=reference"])).history
    shared = tmp_path / "shared"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "two-nodes"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            [sys.executable, "-m", "fedlalr", "run", "quickstart", *settings, "--run-dir", str(shared)],
            env=os.environ | world | {"RANK": str(node), "NCCL_HOSTID": f"node-{node}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    assert "engine distributed (2 processes, each training" in said[0]
    assert "after 3 rounds" not in said[1]
    mine = [json.loads(line) for line in (shared / "metrics.jsonl").open()]
    for ours, theirs in zip(mine, right, strict=True):
        for name in ("train_loss", "loss", "accuracy"):
            assert ours[name] == pytest.approx(getattr(theirs, name), rel=1e-4)


def test_alone_it_is_the_engine_inside():
    result, _ = scenarios.job("distributed")
    wanted, _ = scenarios.job("reference")
    assert result.info.reason.startswith("1 process")
    assert all(torch.equal(result.state["x"][name], value) for name, value in wanted.state["x"].items())


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_shards_are_contiguous_cover_everything_and_differ_by_a_client_at_most(costs, count):
    parts = shard(torch.tensor(costs), count)
    assert len(parts) == count
    assert [row for part in parts for row in range(len(costs))[part]] == list(range(len(costs)))
    ideal = sum(costs) / count
    assert all(abs(sum(costs[part]) - ideal) <= max(costs) for part in parts)


class One(Ranks):
    """One of several ranks."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=5), st.data())
def test_rows_of_a_spread_stack_are_found_where_they_lie(counts, data):
    every = torch.arange(sum(counts))
    chosen = data.draw(st.sets(st.sampled_from(every.tolist()))) if len(every) else set()
    index = torch.tensor(sorted(chosen), dtype=torch.int64)
    found = []
    for rank in range(len(counts)):
        spread = Spread(One(rank, len(counts)), tuple(counts))
        places, left = spread.rows(index)
        found.append(spread.mine(every)[places])
        assert torch.equal(found[-1], left.mine(every[index]))
    assert torch.equal(torch.cat(found), index)


@pytest.mark.parametrize("name", ["workers:0", "workers:x", "distributed:workers", "stacked:2", "nothing"])
def test_a_wrong_engine_or_option_is_rejected(name):
    with pytest.raises(ValueError, match="engine"):
        fl.run(scenarios.make_model(), scenarios.make_clients(), fl.FedAvg(), engine=name)
