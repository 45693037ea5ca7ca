"""Real Flower runs after their superlink was killed, and private ones: `make test-flower`."""

import math

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from fedlalr.config import RunDirectory
from fedlalr.federation.privacy.accounting import epsilon
from fedlalr.training.layout import Layout
from flower.deployed import (
    PATIENCE,
    assert_same_bits,
    final_state,
    run_to_end,
    simulate,
    start_and_kill_node_1,
    start_superlink,
    submit,
    task,
    wait_until,
)
from flower.killing import kill

pytestmark = [pytest.mark.flower, pytest.mark.timeout(1500)]
DATABASE = True
"""The superlink keeps its state in a file, so that it can be killed."""


def test_a_run_resumes_to_the_same_bits_after_the_superlink_was_killed(federation, tmp_path):
    """With codecs whose errors the clients keep on their nodes."""
    options = {"compression": "balanced", "rounds": 2}
    run_dir = tmp_path / "run"
    progress = submit(federation, run_dir, **options)
    wait_until(lambda: progress() >= 1)
    kill(federation.processes, "superlink")
    assert progress() == 1
    start_superlink(federation, database=True)
    kill(federation.processes, "run")
    records = run_to_end(federation, run_dir, **options)
    assert [record.round for record in records] == [1, 2]
    assert_same_bits(run_dir, simulate(**options))


def test_a_private_run_continues_without_a_supernode_that_is_killed_mid_round(federation, tmp_path):
    """Its client counts as zero in that round; nodes send no losses, and every round spends privacy."""
    options = {"algorithm": "fedavg", "rounds": 2, "min_clients": 1, "noise": 1.0}
    run_dir = tmp_path / "private"
    progress, _ = start_and_kill_node_1(federation, run_dir, **options)
    federation.wait_for(run_dir.name, PATIENCE, progress)
    records = RunDirectory(run_dir).records()
    assert [record.clients for record in records] == [3, 2]
    assert [(client, "its node is not available" in why) for client, why in records[1].rejected] == [(1, True)]
    assert [record.epsilon for record in records] == [epsilon(1.0, 1.0, t, 1e-3) for t in (1, 2)]
    assert all(math.isnan(record.train_loss) for record in records)
    change = final_state(run_dir)["slot/x"] - Layout.of(task.model()).flatten(dict(task.model().named_parameters()))
    deviation = math.sqrt(2) * 1.0 * 0.1 / 3  # of the noise of two rounds, in each coordinate
    assert 0.5 * deviation < change.std() < 3 * deviation
