"""What a run on Flower costs: bytes on the wire, seconds a round, and the server's memory.

    python benchmarks/flower.py wire --parameters 600000 --nodes 3 --rounds 2
    python benchmarks/flower.py wire --parameters 10000000 --nodes 3 --rounds 2
    python benchmarks/flower.py memory --parameters 10000000

`wire` starts real processes on loopback (TLS, node keys). The clients take one local step, so that the exchange is what
is measured. `memory` feeds replies to the server's half of a round without any transport, each count in a process of
its own, and reports the highest resident memory: uploads on disk, as on Flower, against uploads in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
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
serverapp = "cost_app.apps:server"
clientapp = "cost_app.apps:client"
[tool.flwr.app.config]
parameters = 1000
rounds = 1
nodes = 3
run-dir = ""
layout = "records"
"""

_APPS = '''\
"""One local step of a network of a given size."""

import json
import resource
from pathlib import Path

import torch
from flwr.serverapp import ServerApp

import fedlalr as fl
from fedlalr.flower import FederatedStrategy, client_app


def model(context):
    torch.manual_seed(0)
    width = int(context.run_config["parameters"]) // (64 + 10)
    return fl.models.MLP(inputs=64, hidden=width, classes=10)


def data(context):
    generator = torch.Generator().manual_seed(int(context.node_config["partition-id"]))
    return torch.randn(32, 64, generator=generator), torch.randint(0, 10, (32,), generator=generator)


SETTINGS = {"local": fl.Steps(1), "batch_size": 32, "device": "cpu", "max_norm_ratio": None}
client = client_app(model, data, fl.FedLALR(), SETTINGS)
server = ServerApp()


@server.main()
def main(grid, context):
    config = context.run_config
    files = {"rounds": int(config["rounds"]), "run_dir": str(config["run-dir"]), "min_clients": int(config["nodes"])}
    strategy = FederatedStrategy(
        model(context), fl.FedLALR(), SETTINGS | files, population=int(config["nodes"]), layout=str(config["layout"])
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    strategy.start(grid)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    Path(str(config["run-dir"]), "memory.json").write_text(json.dumps({"before": before, "after": after}))
'''


def wire(parameters: int, nodes: int, rounds: int, layout: str) -> dict[str, object]:
    """Run on real processes, and compare what Flower counted with the slot table."""
    from fedlalr.config import RunDirectory
    from fedlalr.flower.local.launch import LocalFederation

    with tempfile.TemporaryDirectory(prefix="fedlalr-cost-") as name:
        folder, run_dir = Path(name), Path(name, "run")
        (folder / "app" / "cost_app").mkdir(parents=True)
        (folder / "app" / "pyproject.toml").write_text(_PYPROJECT)
        (folder / "app" / "cost_app" / "__init__.py").write_text("")
        (folder / "app" / "cost_app" / "apps.py").write_text(_APPS)
        with LocalFederation(folder / "federation") as federation:
            federation.start_superlink()
            for node in range(nodes):
                federation.start_node(node, {"partition-id": node}, keys=federation.register(node))
            config = {"parameters": parameters, "rounds": rounds, "nodes": nodes, "layout": layout}
            federation.submit(folder / "app", {**config, "run-dir": str(run_dir)})
            directory = RunDirectory(run_dir)
            federation.wait_for("run", 900, lambda: len(directory.records()))
            records = directory.records()
            if len(records) < rounds:
                raise SystemExit(federation.tail("run", 60))
            traffic = _traffic(federation)
        memory = json.loads((run_dir / "memory.json").read_text())
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
        "server app, MB resident before and at most": [round(memory[k] / 1024) for k in ("before", "after")],
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
    from fedlalr.federation import Expected, Reply
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
    parser.add_argument("what", choices=("wire", "memory", "hold"))
    parser.add_argument("--parameters", type=int, default=600_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layout", choices=("records", "packed"), default="records")
    parser.add_argument("--replies", type=int, default=2)
    parser.add_argument("--where", choices=("disk", "memory"), default="disk")
    given = parser.parse_args()
    if given.what == "wire":
        print(json.dumps(wire(given.parameters, given.nodes, given.rounds, given.layout), indent=1))
    elif given.what == "memory":
        for row in memory(given.parameters):
            print(json.dumps(row))
    else:
        print(hold(given.parameters, given.replies, given.where))


if __name__ == "__main__":
    main()
