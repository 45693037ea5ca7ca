"""Runs on Flower's real processes, on loopback, with TLS and node keys, and the same runs in the simulator."""

import importlib
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

import fedlalr as fl
from fedlalr.config import RunDirectory
from fedlalr.flower.local.launch import LocalFederation
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.layout import Layout
from flower.killing import kill

APP = Path(__file__).parent / "faulty"
sys.path.append(str(APP))
task = importlib.import_module("faulty_app.task")

PATIENCE = 900.0
"""Timeout: seconds without a finished round; generous, for busy machines."""
DEFAULTS = {
    "algorithm": "fedlalr", "momentum": "average", "second-moment": "mean", "rounds": 2, "min-clients": 3,
    "hidden": 8, "compression": "", "noise": 0.0, "buffer": 0, "partial": 0.0,
}  # fmt: skip


def start(folder, *, database):
    """A federation of three nodes. A context manager that has been entered."""
    federation = LocalFederation(folder).__enter__()
    federation.processes.environment["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] = "0.5"  # seconds; Flower's default is 1
    try:
        start_superlink(federation, database=database)
        for node in range(task.CLIENTS):
            start_node(federation, node, federation.register(node))
    except BaseException:
        federation.__exit__(None, None, None)
        raise
    return federation


def start_superlink(federation, *, database):
    """With a database, a superlink that is started again knows the nodes and runs of the one before."""
    federation.start_superlink(*(["--database", federation.folder / "superlink.db"] if database else []))


def start_node(federation, node, keys):
    federation.start_node(node, {"partition-id": node, "state-dir": str(federation.folder / "kept")}, keys=keys)


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


def start_and_kill_node_1(federation, run_dir, waiting=(1,), **config):
    """Start a run whose clients `waiting` wait in round 2, and kill the node of client 1 then.

    Returns a function that reports the run's progress, and the files to remove so that the others continue.
    """
    marker = run_dir.with_name("marker")
    progress = submit(
        federation, run_dir, faults="+".join(f"{client}:wait" for client in waiting), marker=str(marker), **config
    )
    markers = [Path(f"{marker}-{client}") for client in waiting]
    wait_until(lambda: all(each.exists() for each in markers))
    kill(federation.processes, "node-1")
    return progress, markers


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


def simulate(broken=None, cut=(), **config):
    """The same run in the simulator.

    broken: round → clients that fail; cut: rounds and clients that make one local step only.
    """
    config = {**DEFAULTS, **{name.replace("_", "-"): value for name, value in config.items()}}

    class Cut(ReferenceEngine):
        def train_client(self, work, row, client, traces):
            return super().train_client(work, row, client, traces, lambda: (work.round, client) in cut)

    def rounds(client):
        return [round for round, clients in (broken or {}).items() if client in clients]

    return fl.run(
        task.model(config["hidden"]),
        [Breaking(client, rounds(client)) for client in range(task.CLIENTS)],
        task.algorithm(config),
        engine=Cut,
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


def wait_until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)
