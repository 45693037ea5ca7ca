"""Real Flower nodes that hang, are killed or may not connect: `make test-flower`."""

import math
import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from fedlalr.config import RunDirectory
from fedlalr.flower.local.certificates import NodeKeys, make_node_keys, make_server_files
from flower.deployed import (
    PATIENCE,
    assert_same_bits,
    run_to_end,
    simulate,
    start_and_kill_node_1,
    start_node,
    task,
    wait_until,
)
from flower.killing import kill

pytestmark = [pytest.mark.flower, pytest.mark.timeout(1500)]


def test_nodes_without_a_registered_key_or_with_another_authority_cannot_connect(federation, tmp_path):
    other = make_server_files(tmp_path / "other", ["127.0.0.1"]).authority
    stranger = make_node_keys(tmp_path, "stranger")
    federation.start_node(10, {"partition-id": 0})
    federation.start_node(11, {"partition-id": 0}, keys=stranger)
    ours = federation.certificates
    federation.certificates = ours._replace(authority=other)
    federation.start_node(12, {"partition-id": 0}, keys=stranger)
    federation.certificates = ours
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
            kill(federation.processes, f"node-{node}")


def test_a_killed_node_and_a_hanging_client_take_part_again(federation, tmp_path):
    """In round 2 the node of client 1 is killed, and client 2 hangs until the deadline. Flower notices a killed node
    after a minute at most. Clients of SCAFFOLD keep a state on their nodes. The messages have the packed layout."""
    options = {"algorithm": "scaffold", "rounds": 3, "min_clients": 1}
    run_dir = tmp_path / "run"
    flower = {"deadline": 90.0, "layout": "packed"}
    progress, markers = start_and_kill_node_1(federation, run_dir, waiting=(1, 2), **flower, **options)
    wait_until(lambda: progress() >= 2)
    for marker in markers:
        marker.unlink()
    key = federation.folder / "keys" / "node-1"
    start_node(federation, 1, NodeKeys(key, key.with_suffix(".pub")))
    federation.wait_for(run_dir.name, PATIENCE, progress)
    records = RunDirectory(run_dir).records()
    (_, killed), (_, hanging) = records[1].rejected
    assert [client for client, _ in records[1].rejected] == [1, 2]
    assert "its node is not available" in killed
    assert hanging == "no reply within the deadline of 90 s"
    assert [record.clients for record in records] == [3, 1, 3], "the restarted node takes part"
    assert_same_bits(run_dir, simulate(broken={2: [1, 2]}, **options))


def test_an_asynchronous_run_updates_without_waiting_for_every_node(federation, tmp_path):
    records = run_to_end(federation, tmp_path / "asynchronous", buffer=2, rounds=3, min_clients=1)
    assert [record.clients for record in records] == [2] * 3
    assert any(record.staleness for record in records), "a third reply always belongs to an older version"
    assert all(math.isfinite(record.loss) for record in records)  # of other nodes in each, as fast as they happen to be
