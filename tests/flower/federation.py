"""A small federation on an in-process grid, and the same one in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.flower import FederatedStrategy, client_app
from flower.in_process import InProcessGrid, Node

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "local": fl.Epochs(1),
    "batch_size": 6,
    "weight_decay": 1e-3,
    "schedule": fl.schedules.Exponential(0.9),
    "clip_norm": 2.0,
    "seed": 5,
    "device": "cpu",
}
PAIRS = make_clients()
POPULATION = len(PAIRS)


def with_buffers() -> nn.Module:
    """A module with normalisation statistics, float and integer."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def nodes(
    algorithm: fl.Algorithm,
    state_dir: Path,
    make: Any = make_model,
    settings: dict[str, Any] | None = None,
    mods: Any = (),
) -> dict[int, Node]:
    """One node per client, with node ids unrelated to the clients' ids."""
    model = make()
    return {
        900 - 7 * client: Node(
            client_app(
                lambda context: model,
                lambda context: PAIRS[int(context.node_config["partition-id"])],
                algorithm,
                SETTINGS | (settings or {}),
                mods=mods,
            ),
            {"partition-id": client, "num-partitions": POPULATION, "state-dir": str(state_dir)},
        )
        for client in range(POPULATION)
    }


def strategy(
    algorithm: fl.Algorithm, make: Any = make_model, settings: dict[str, Any] | None = None, **options: Any
) -> FederatedStrategy:
    """The server for these nodes, with short deadlines."""
    fast = {"population": POPULATION, "poll": 0.001, "deadline": 0.05, "join_deadline": 0.05}
    return FederatedStrategy(make(), algorithm, SETTINGS | (settings or {}), **(fast | options))


def cohorts(grid: InProcessGrid) -> dict[int, list[int]]:
    """The clients that were sent training messages, by round."""
    asked: dict[int, list[int]] = {}
    for message in grid.sent:
        if message.metadata.message_type == "train":
            client = int(grid.nodes[message.metadata.dst_node_id].config["partition-id"])
            asked.setdefault(int(message.metadata.group_id), []).append(client)
    return {round: sorted(clients) for round, clients in asked.items()}


class Cohorts(fl.Observer):
    """Gives a simulation the cohorts of a deployment."""

    def __init__(self, cohorts: dict[int, list[int]]) -> None:
        self.cohorts = cohorts

    def include(self, round: int) -> list[int]:
        return self.cohorts[round]


def simulated(algorithm: fl.Algorithm, make: Any = make_model, settings: dict[str, Any] | None = None) -> fl.Result:
    """The simulator's result."""
    return fl.run(make(), PAIRS, algorithm, engine="reference", **(SETTINGS | (settings or {})))


def same(found: fl.Result | None, wanted: fl.Result) -> bool:
    """Whether two runs have the same final bits and the same records."""
    assert found is not None
    states = all(
        torch.equal(found.state[slot][name], wanted.state[slot][name])
        for slot in wanted.state
        for name in wanted.state[slot]
    )
    buffers = all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(found.model.state_dict().values(), wanted.model.state_dict().values(), strict=True)
    )
    recorded = _recorded(found) == _recorded(wanted)
    return states and buffers and recorded and found.state.keys() == wanted.state.keys()


def _recorded(result: fl.Result) -> list[tuple[Any, ...]]:
    return [
        (r.round, r.loss, r.accuracy, r.train_loss, r.lr, r.bytes_up, r.bytes_down, r.clients) for r in result.history
    ]


__all__ = [
    "POPULATION",
    "SETTINGS",
    "Cohorts",
    "InProcessGrid",
    "cohorts",
    "nodes",
    "same",
    "simulated",
    "strategy",
    "with_buffers",
]
