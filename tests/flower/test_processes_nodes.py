"""Real Flower nodes that hang, are killed or may not connect: `make test-flower`."""

import math
import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from fedlalr.config import RunDirectory
from fedlalr.federation.privacy.accounting import epsilon
from fedlalr.flower.local.certificates import make_node_keys, make_server_files
from fedlalr.training.layout import Layout
from flower.deployed import (
    PATIENCE,
    assert_same_bits,
    final_state,
    run_to_end,
    simulate,
    start_node,
    submit,
    task,
    wait_until,
)

pytestmark = [pytest.mark.flower, pytest.mark.timeout(1500)]


def test_a_hanging_client_is_excluded_at_the_deadline(federation, tmp_path):
    options = {"rounds": 2, "min_clients": 2}
    marker = tmp_path / "marker"
    records = run_to_end(
        federation, tmp_path / "run", faults="wait", marker=str(marker), wait=3600.0, deadline=40.0, **options
    )
    marker.unlink()  # otherwise the client would keep hanging, and block its node in the next test
    assert [(r.client, "no reply within the deadline of 40 s" in r.reason) for r in records[1].rejected] == [(1, True)]
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


def run_with_a_killed_node(federation, run_dir, **options):
    """A run whose node 1 is killed in round 2 and started again afterwards; returns the records."""
    marker = run_dir.with_name("marker")
    progress = submit(federation, run_dir, faults="wait", marker=str(marker), wait=3600.0, **options)
    wait_until(marker.exists)
    federation.processes.kill("node-1")
    wait_until(lambda: progress() >= 2)
    start_node(federation, 1, federation.keys[1])
    federation.wait_for(run_dir.name, PATIENCE, progress)
    records = RunDirectory(run_dir).records()
    assert [(r.client, "its node is not available" in r.reason) for r in records[1].rejected] == [(1, True)], records[1]
    return records


def test_a_supernode_killed_mid_round_takes_part_again_after_a_restart(federation, tmp_path):
    options = {"rounds": 6, "min_clients": 2}  # the last ones give the node time to connect
    run_dir = tmp_path / "run"
    records = run_with_a_killed_node(federation, run_dir, **options)
    assert records[-1].clients == task.CLIENTS, "the restarted node takes part in the last round at the latest"
    away = [record.round for record in records if record.rejected]
    assert_same_bits(run_dir, simulate(broken=away, **options))


def test_a_private_run_continues_without_a_supernode_that_is_killed_mid_round(federation, tmp_path):
    """Its client counts as zero in that round; nodes send no losses, and every round spends privacy."""
    options = {"algorithm": "fedavg", "rounds": 3, "min_clients": 1, "noise": 1.0}
    run_dir = tmp_path / "private"
    records = run_with_a_killed_node(federation, run_dir, **options)
    assert [record.clients for record in records[:2]] == [3, 2]
    assert [record.epsilon for record in records] == [epsilon(1.0, 1.0, t, 1e-3) for t in (1, 2, 3)]
    assert all(math.isnan(record.train_loss) for record in records)
    change = final_state(run_dir)["slot/x"] - Layout.of(task.model()).flatten(dict(task.model().named_parameters()))
    deviation = math.sqrt(3) * 1.0 * 0.1 / 3  # of the noise of three rounds, in each coordinate
    assert 0.5 * deviation < change.std() < 3 * deviation


def test_an_asynchronous_run_updates_without_waiting_for_every_node(federation, tmp_path):
    records = run_to_end(federation, tmp_path / "asynchronous", buffer=2, rounds=4, min_clients=1)
    assert [record.clients for record in records] == [2] * 4
    assert any(record.staleness for record in records), "a third reply always belongs to an older version"
    assert records[-1].loss < records[0].loss
