"""Runs on Flower's real processes, on loopback, with TLS and node keys: the simulator's bits, and every fault handled.

Every message starts a process that imports torch, so these tests take minutes: `make test-flower`.
"""

import importlib
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed")

import fedlalr as fl
from fedlalr.config import RunDirectory
from fedlalr.federation.privacy.accounting import epsilon
from fedlalr.flower.local.certificates import make_node_keys, make_server_files
from fedlalr.flower.local.launch import LocalFederation
from fedlalr.training.layout import Layout

APP = Path(__file__).parent / "faulty"
sys.path.append(str(APP))
task = importlib.import_module("faulty_app.task")

pytestmark = [pytest.mark.flower, pytest.mark.timeout(3000)]

PATIENCE = 900.0
"""Timeout: seconds without a finished round; generous, for busy machines."""
DEFAULTS = {
    "algorithm": "fedlalr", "momentum": "average", "second-moment": "mean", "rounds": 2, "min-clients": 3,
    "hidden": 8, "compression": "", "noise": 0.0,
}  # fmt: skip


def start(folder, database=False):
    """A federation of three nodes. A context manager."""
    federation = LocalFederation(folder, database=database)
    with_federation = federation.__enter__()
    try:
        with_federation.start_superlink()
        for node in range(task.CLIENTS):
            start_node(with_federation, node, with_federation.register(node))
    except BaseException:
        federation.__exit__(None, None, None)
        raise
    return federation


def start_node(federation, node, keys):
    federation.start_node(node, {"partition-id": node, "state-dir": str(federation.folder / "kept")}, keys=keys)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    federation = start(tmp_path_factory.mktemp("federation"))
    yield federation
    federation.__exit__(None, None, None)
    assert federation.processes.members() == []


def submit(federation, run_dir, **config):
    """Start a run; returns a function that reports its progress."""
    given = {name.replace("_", "-"): value for name, value in config.items()}
    federation.submit(APP, {**given, "run-dir": str(run_dir)}, name=run_dir.name)
    return lambda: len(RunDirectory(run_dir).records())


def run_to_end(federation, run_dir, **config):
    """Run to the end; returns the records."""
    progress = submit(federation, run_dir, **config)
    federation.wait_for(run_dir.name, PATIENCE, progress)
    records = RunDirectory(run_dir).records()
    rounds = config.get("rounds", DEFAULTS["rounds"])
    assert len(records) == rounds, federation.tail(run_dir.name, 80)
    return records


def final_state(run_dir):
    """The server's slots and buffers in the last checkpoint."""
    return load_file(sorted((run_dir / "checkpoint").glob("round-*"))[-1] / "state.safetensors")


class Breaking(torch.utils.data.Dataset):
    """A client's samples that cannot be read in some rounds."""

    round = 0

    def __init__(self, client, rounds):
        self.pair, self.rounds = task.data(client), rounds

    def __len__(self):
        return len(self.pair[1])

    def __getitem__(self, index):
        if Breaking.round in self.rounds:
            raise RuntimeError("not in this round")
        return self.pair[0][index], self.pair[1][index]


class Clock(fl.Observer):
    def include(self, round):
        Breaking.round = round
        return ()


def simulate(broken=(), **config):
    """The same run in the simulator, with client 1 failing in some rounds."""
    config = {**DEFAULTS, **{name.replace("_", "-"): value for name, value in config.items()}}
    clients = [Breaking(client, broken if client == task.MISBEHAVING else ()) for client in range(task.CLIENTS)]
    return fl.run(
        task.model(config["hidden"]),
        clients,
        task.algorithm(config),
        engine="reference",
        observers=[Clock()],
        **task.settings(config),
    )


def assert_same_bits(run_dir, wanted):
    found, layout = final_state(run_dir), Layout.of(wanted.model)
    slots = {f"slot/{name}": layout.flatten(tensors) for name, tensors in wanted.state.items()}
    buffers = {f"buffer/{name}": buffer for name, buffer in wanted.model.named_buffers()}
    assert found.keys() == slots.keys() | buffers.keys()
    assert [name for name, value in {**slots, **buffers}.items() if not torch.equal(found[name], value)] == []
    records = RunDirectory(run_dir).records()
    assert [(r.round, r.loss, r.train_loss, r.clients, r.bytes_up) for r in records] == [
        (r.round, r.loss, r.train_loss, r.clients, r.bytes_up) for r in wanted.history
    ]


@pytest.mark.parametrize("momentum", ["average", "restart"])
@pytest.mark.parametrize("second_moment", ["mean", "max"])
def test_fedlalr_gives_the_simulators_bits(federation, tmp_path, momentum, second_moment):
    layout = "packed" if momentum == "restart" else "records"
    variant = {"momentum": momentum, "second_moment": second_moment}
    run_to_end(federation, tmp_path / "run", layout=layout, **variant)
    assert_same_bits(tmp_path / "run", simulate(**variant))


def test_a_compressed_run_gives_the_simulators_bits_and_flower_counts_the_recorded_bytes(federation, tmp_path):
    variant = {"momentum": "restart", "second_moment": "max", "compression": "balanced", "hidden": 50_000}
    run_to_end(federation, tmp_path / "run", **variant)
    wanted = simulate(**variant)
    assert_same_bits(tmp_path / "run", wanted)
    traffic = federation.status()[0]["network-traffic"]
    assert traffic["inbound-bytes"] == pytest.approx(wanted.bytes_up, rel=0.01)
    assert traffic["outbound-bytes"] == pytest.approx(wanted.bytes_down, rel=0.01)


def test_a_faulty_client_is_excluded_only_from_its_faulty_rounds(federation, tmp_path):
    expected = {
        2: ("raise", "its client app raised"),
        3: ("nan", "m is not finite"),
        4: ("shape", "has shape (1,)"),
        5: ("v_hat", "v_hat fell below the broadcast"),
        6: ("stale", "belongs to round 5"),
        7: ("die", "its client app's process died"),
    }
    options = {"rounds": 8, "min_clients": 2}
    records = run_to_end(federation, tmp_path / "run", faults=",".join(f for f, _ in expected.values()), **options)
    for record in records:
        _, reason = expected.get(record.round, ("", ""))
        assert [(r.client, reason in r.reason) for r in record.rejected] == ([(1, True)] if reason else []), record
    assert_same_bits(tmp_path / "run", simulate(broken=expected, **options))


def test_a_hanging_client_is_excluded_at_the_deadline(federation, tmp_path):
    options = {"rounds": 2, "min_clients": 2}
    marker = tmp_path / "marker"
    records = run_to_end(
        federation, tmp_path / "run", faults="wait", marker=str(marker), wait=3600.0, deadline=150.0, **options
    )
    marker.unlink()  # otherwise the client would keep hanging, and block its node in the next test
    assert [(r.client, "no reply within the deadline of 150 s" in r.reason) for r in records[1].rejected] == [(1, True)]
    assert_same_bits(tmp_path / "run", simulate(broken=[2], **options))


def test_nodes_without_a_registered_key_or_with_another_authority_cannot_connect(federation, tmp_path):
    other = make_server_files(tmp_path / "other", ["127.0.0.1"]).authority
    stranger = make_node_keys(tmp_path, "stranger")
    federation.start_node(10, {"partition-id": 0})
    federation.start_node(11, {"partition-id": 0}, keys=stranger)
    federation.start_node(12, {"partition-id": 0}, keys=stranger, authority=other)
    said = {10: "", 11: "", 12: ""}
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not all(said.values()):
        for node in said:
            text = federation.log(f"node-{node}").read_text()
            if not federation.processes.alive(f"node-{node}") or "certificate" in text.lower():
                said[node] = text
        time.sleep(1)
    for node, text in said.items():
        assert text, f"node {node} neither ended nor complained:\n{federation.tail(f'node-{node}')}"
        assert "SuperNode ID" not in text
    listed = federation.flwr("supernode", "list", "local", "--format", "json")
    assert listed.count('"online"') == task.CLIENTS, listed
    for node in said:
        if federation.processes.alive(f"node-{node}"):
            federation.processes.kill(f"node-{node}")


def wait_until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def test_a_supernode_killed_mid_round_takes_part_again_after_a_restart(federation, tmp_path):
    options = {"rounds": 4, "min_clients": 2}
    run_dir, marker = tmp_path / "run", tmp_path / "marker"
    progress = submit(federation, run_dir, faults="wait", marker=str(marker), wait=3600.0, **options)
    wait_until(marker.exists)
    federation.processes.kill("node-1")
    wait_until(lambda: progress() >= 2)
    start_node(federation, 1, federation.keys[1])
    federation.wait_for("run", PATIENCE, progress)
    records = RunDirectory(run_dir).records()
    assert [(r.client, "its node is not available" in r.reason) for r in records[1].rejected] == [(1, True)], records[1]
    assert records[-1].clients == task.CLIENTS, "the restarted node takes part in the last round at the latest"
    away = [record.round for record in records if record.rejected]
    assert_same_bits(run_dir, simulate(broken=away, **options))


def test_a_private_run_continues_without_a_supernode_that_is_killed_mid_round(federation, tmp_path):
    """Its client counts as zero in that round; nodes send no losses, and every round spends privacy."""
    options = {"algorithm": "fedavg", "rounds": 3, "min_clients": 1, "noise": 1.0}
    run_dir, marker = tmp_path / "private", tmp_path / "marker"
    progress = submit(federation, run_dir, faults="wait", marker=str(marker), wait=3600.0, **options)
    wait_until(marker.exists)
    federation.processes.kill("node-1")
    wait_until(lambda: progress() >= 2)
    start_node(federation, 1, federation.keys[1])
    federation.wait_for("private", PATIENCE, progress)
    records = RunDirectory(run_dir).records()
    assert [record.clients for record in records[:2]] == [3, 2]
    assert [(r.client, "its node is not available" in r.reason) for r in records[1].rejected] == [(1, True)], records[1]
    assert [record.epsilon for record in records] == [epsilon(1.0, 1.0, t, 1e-3) for t in (1, 2, 3)]
    assert all(math.isnan(record.train_loss) for record in records)
    change = final_state(run_dir)["slot/x"] - Layout.of(task.model()).flatten(dict(task.model().named_parameters()))
    deviation = math.sqrt(3) * 1.0 * 0.1 / 3  # of the noise of three rounds, in each coordinate
    assert 0.5 * deviation < change.std() < 3 * deviation


@pytest.mark.parametrize("algorithm", ["fedlalr", "scaffold"])
def test_a_run_resumes_to_the_same_bits_after_the_superlink_was_killed(tmp_path, algorithm):
    federation = start(tmp_path / "federation", database=True)
    try:
        options = {"algorithm": algorithm, "rounds": 4}
        run_dir = tmp_path / "run"
        progress = submit(federation, run_dir, **options)
        wait_until(lambda: progress() >= 2)
        federation.processes.kill("superlink")
        done = progress()
        assert done < 4
        federation.start_superlink()
        federation.processes.kill("run")
        records = run_to_end(federation, run_dir, **options)
        assert [record.round for record in records] == [1, 2, 3, 4]
        assert_same_bits(run_dir, simulate(**options))
    finally:
        federation.__exit__(None, None, None)
    assert federation.processes.members() == []
