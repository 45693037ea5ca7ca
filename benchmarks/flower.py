"""What a run on Flower costs: bytes on the wire, seconds a round, and the server's memory.

    python benchmarks/flower.py wire --parameters 600000 --nodes 3 --rounds 2
    python benchmarks/flower.py wire --parameters 10000000 --nodes 3 --rounds 2
    python benchmarks/flower.py latency --parameters 600000 --nodes 3 --rounds 8
    python benchmarks/flower.py memory --parameters 10000000

`wire` and `latency` start real processes on loopback (TLS, node keys). The clients take one local step, so that the
exchange is what is measured. `latency` puts an empty round, which moves nothing and trains nothing, after every round:
the ratio of the two is what a round costs beyond Flower itself. `memory` feeds replies to the server's half of a round
without any transport, each count in a process of its own, and reports the highest resident memory: uploads on disk, as
on Flower, against uploads in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PYPROJECT = """\
[project]
name = "cost-app"
version = "1.0.0"
description = "One local step of a network of a given size"
dependencies = ["fedlalr[flower]"]
[tool.flwr.app]
publisher = "fedlalr"
[tool.flwr.app.components]
serverapp = "cost_app.server_app:app"
clientapp = "cost_app.client_app:app"
[tool.flwr.app.config]
parameters = 1000
rounds = 1
nodes = 3
run-dir = ""
layout = "records"
empty = false
"""

_TASK = '''\
"""One local step of a network of a given size."""

import torch

import fedlalr as fl


def model(context):
    torch.manual_seed(0)
    width = int(context.run_config["parameters"]) // (64 + 10)
    return fl.models.MLP(inputs=64, hidden=width, classes=10)


def data(context):
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    return torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)


algorithm = fl.FedLALR()
settings = {"local": fl.Steps(1), "batch_size": 32, "device": "cpu", "max_norm_ratio": None}
'''

_CLIENT = '''\
"""The client app, which also answers empty messages at once."""

from flwr.app import Message, RecordDict

from fedlalr.flower import client_app

TASK = "cost_app.task"
app = client_app(f"{TASK}:model", f"{TASK}:data", f"{TASK}:algorithm", f"{TASK}:settings")


@app.train("empty")
def empty(message, context):
    return Message(RecordDict(), reply_to=message)
'''

_SERVER = '''\
"""The server app: an empty round after every round."""

import json
import resource
import time
from pathlib import Path

from cost_app import task
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

import fedlalr as fl
from fedlalr.flower import FederatedStrategy
from fedlalr.flower.wire.messages import Post

app = ServerApp()
POLL = 1.0


class Rounds(fl.Observer):
    """The seconds of every round, with its record and checkpoint, and of an empty round after it."""

    def __init__(self, grid, wanted):
        self.grid, self.wanted = grid, wanted
        self.rounds, self.empty = [], []
        self.since = time.monotonic()

    def on_round(self, record):
        began = time.monotonic()
        self.rounds.append(began - self.since)
        if self.wanted:
            post = Post(self.grid)
            post.send([(node, Message(RecordDict(), node, "train.empty")) for node in self.grid.get_node_ids()])
            for _, reply in post.until(began + 600, POLL):
                assert not reply.has_error(), reply.error
        self.since = time.monotonic()
        self.empty.append(self.since - began)


@app.main()
def main(grid, context):
    config = context.run_config
    folder, observed = Path(str(config["run-dir"])), Rounds(grid, bool(config["empty"]))
    files = {"rounds": int(config["rounds"]), "run_dir": str(folder), "min_clients": int(config["nodes"])}
    strategy = FederatedStrategy(
        task.model(context), task.algorithm, task.settings | files, population=int(config["nodes"]),
        layout=str(config["layout"]), poll=POLL, observers=[observed],
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strategy.start(grid)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"before": before, "after": after, "rounds": observed.rounds, "empty": observed.empty}
    (folder / "cost.json").write_text(json.dumps(found))
'''


def start_app(folder: Path) -> Path:
    """Write the app into a folder."""
    package = folder / "cost_app"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_PYPROJECT)
    for name, text in (("__init__", ""), ("task", _TASK), ("client_app", _CLIENT), ("server_app", _SERVER)):
        (package / f"{name}.py").write_text(text)
    return folder


def federate(config: dict[str, Any], warm: bool = True) -> tuple[list[Any], dict[str, Any], dict[str, int]]:
    """Run the app with real processes; returns the records, the costs and Flower's count of bytes."""
    from fedlalr.config import RunDirectory
    from fedlalr.flower.local.launch import LocalFederation

    with tempfile.TemporaryDirectory(prefix="fedlalr-cost-") as name:
        folder, run_dir = Path(name), Path(name, "run")
        with LocalFederation(folder / "federation") as federation:
            federation.start_superlink()
            for node in range(config["nodes"]):
                federation.start_node(node, {"partition-id": node, "warm": warm}, keys=federation.register(node))
            federation.submit(start_app(folder / "app"), {**config, "run-dir": str(run_dir)})
            directory = RunDirectory(run_dir)
            federation.wait_for("run", 900, lambda: len(directory.records()))
            records = directory.records()
            if len(records) < config["rounds"]:
                raise SystemExit(federation.tail("run", 60))
            traffic = _traffic(federation)
        return records, json.loads((run_dir / "cost.json").read_text()), traffic


def wire(parameters: int, nodes: int, rounds: int, layout: str) -> dict[str, object]:
    """Run on real processes, and compare what Flower counted with the slot table."""
    config = {"parameters": parameters, "rounds": rounds, "nodes": nodes, "layout": layout}
    records, cost, traffic = federate(config)
    up, down = sum(r.bytes_up for r in records), sum(r.bytes_down for r in records)
    return {
        "parameters": parameters,
        "nodes": nodes,
        "layout": layout,
        "slot table, MB up a round": round(up / rounds / 1e6, 2),
        "slot table, MB down a round": round(down / rounds / 1e6, 2),
        "Flower's count up / slot table": round(traffic["inbound-bytes"] / up, 3),
        "Flower's count down / slot table": round(traffic["outbound-bytes"] / down, 3),
        "seconds a round": [round(record.seconds, 1) for record in records],
        "of which screening, reducing, checkpoint": [
            round(sum(v for k, v in record.timing.items() if k != "train"), 2) for record in records
        ],
        "server app, MB resident before and at most": [round(cost[k] / 1024) for k in ("before", "after")],
    }


def latency(parameters: int, nodes: int, rounds: int, warm: bool) -> dict[str, object]:
    """Rounds and empty rounds in turn, in one run: what a round costs beyond Flower itself."""
    config = {"parameters": parameters, "rounds": rounds, "nodes": nodes, "layout": "records", "empty": True}
    records, cost, _ = federate(config, warm)
    ours, empty = (statistics.median(cost[what][1:]) for what in ("rounds", "empty"))  # the first starts the trainers
    moved = (records[-1].bytes_up + records[-1].bytes_down) / 1e6
    return {
        "parameters": parameters,
        "nodes": nodes,
        "warm": warm,
        "seconds a round": [round(value, 1) for value in cost["rounds"]],
        "seconds an empty round": [round(value, 1) for value in cost["empty"]],
        "medians after the first": [round(ours, 2), round(empty, 2)],
        "ratio": round(ours / empty, 2),
        "seconds beyond the empty round per 100 MB moved": round((ours - empty) / moved * 100, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def _traffic(federation: Any) -> dict[str, int]:
    """What Flower counted in the last run; a superlink that still moves large messages may need a moment to say it."""
    from fedlalr.flower.local.launch import FederationError

    for left in range(10, -1, -1):
        try:
            counted: dict[str, int] = federation.status()[0]["network-traffic"]
            return counted
        except FederationError:
            if left == 0:
                raise
            time.sleep(5)
    raise AssertionError


def hold(parameters: int, replies: int, where: str) -> float:
    """The highest resident memory, in MB, of a process that takes in and reduces so many replies."""
    import torch

    import fedlalr as fl
    from fedlalr.algorithms.slots import Slots
    from fedlalr.federation.replies.payload import Expected, Reply
    from fedlalr.federation.replies.reducing import reduce_slots, weights
    from fedlalr.flower.server.inbox import SpooledInbox
    from fedlalr.training.layout import Layout

    torch.set_num_threads(1)
    table, layout = fl.FedLALR().slots, Layout(("w",), (torch.Size([parameters]),), torch.float32)
    broadcast = Slots(x=torch.zeros(parameters), m=torch.zeros(parameters), v_hat=torch.full((parameters,), 1e-16))
    share = weights(torch.ones(replies), "uniform", torch.float32, torch.device("cpu"))
    replied = (broadcast.map(lambda slot, client=client: slot + (client + 1) * 1e-3) for client in range(replies))
    if where == "memory":
        held = list(replied)
        uploads = Slots(**{name: torch.stack([slots[name] for slots in held]) for name in table.up})
        reduce_slots(uploads, broadcast, share, table)
    else:
        inbox = SpooledInbox(Expected("ab", 1, frozenset(range(replies)), "c", layout, table, broadcast))
        for client, slots in enumerate(replied):
            named = {name: {"w": slots[name]} for name in table.up}
            rejected = inbox.receive(Reply(client, "ab", 1, "c", 10, 1, named))
            assert rejected is None, rejected
        inbox.reduce(inbox.close(1000.0), share, {})
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def memory(parameters: int) -> list[dict[str, object]]:
    """The same for several numbers of replies, each in a process of its own."""
    found = []
    for replies in (2, 4, 8, 16):
        row: dict[str, object] = {"replies": replies, "one reply, MB": round(3 * parameters * 4 / 1e6)}
        for where in ("disk", "memory"):
            command = [sys.executable, __file__, "hold", "--parameters", str(parameters), "--replies", str(replies)]
            done = subprocess.run([*command, "--where", where], capture_output=True, text=True, check=True)
            row[f"uploads on {where}, MB" if where == "disk" else "uploads in memory, MB"] = round(float(done.stdout))
        found.append(row)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("wire", "latency", "memory", "hold"))
    parser.add_argument("--cold", action="store_true", help="train in the process that Flower starts for a message")
    parser.add_argument("--parameters", type=int, default=600_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layout", choices=("records", "packed"), default="records")
    parser.add_argument("--replies", type=int, default=2)
    parser.add_argument("--where", choices=("disk", "memory"), default="disk")
    given = parser.parse_args()
    if given.what == "wire":
        print(json.dumps(wire(given.parameters, given.nodes, given.rounds, given.layout), indent=1))
    elif given.what == "latency":
        print(json.dumps(latency(given.parameters, given.nodes, given.rounds, not given.cold), indent=1))
    elif given.what == "memory":
        for row in memory(given.parameters):
            print(json.dumps(row))
    else:
        print(hold(given.parameters, given.replies, given.where))


if __name__ == "__main__":
    main()
