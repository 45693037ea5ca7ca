"""What the nodes' trainers import: the functions of `task` for a context."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flwr.app import Context
from torch import Tensor, nn
from torch.utils.data import Dataset

import fedlalr as fl
from faulty_app import task


def model(context: Context) -> nn.Module:
    """The network."""
    return task.model(int(context.run_config["hidden"]))


def data(context: Context) -> object:
    """The samples of the node's client."""
    client, seconds = int(context.node_config["partition-id"]), float(context.run_config["partial"])
    pair = task.data(client)
    return Slow(pair, Path(f"{context.run_config['marker']}-{client}"), seconds) if seconds else pair


class Slow(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take some seconds to read if a file exists, which is then removed."""

    def __init__(self, pair: tuple[Tensor, Tensor], marker: Path, seconds: float) -> None:
        self.pair, self.marker, self.seconds = pair, marker, seconds

    def __len__(self) -> int:
        return len(self.pair[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.marker.exists():
            self.marker.unlink()
            time.sleep(self.seconds)
        return self.pair[0][index], self.pair[1][index]


def algorithm(context: Context) -> fl.Algorithm:
    """The method."""
    return task.algorithm(context.run_config)


def settings(context: Context) -> dict[str, Any]:
    """The options of `fl.run`."""
    return task.settings(context.run_config)
