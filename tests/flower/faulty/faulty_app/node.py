"""What the nodes' trainers import: the functions of `task` for a context."""

from __future__ import annotations

from typing import Any

from flwr.app import Context
from torch import Tensor, nn

import fedlalr as fl
from faulty_app import task


def model(context: Context) -> nn.Module:
    """The network."""
    return task.model(int(context.run_config["hidden"]))


def data(context: Context) -> tuple[Tensor, Tensor]:
    """The samples of the node's client."""
    return task.data(int(context.node_config["partition-id"]))


def algorithm(context: Context) -> fl.Algorithm:
    """The method."""
    return task.algorithm(context.run_config)


def settings(context: Context) -> dict[str, Any]:
    """The options of `fl.run`."""
    return task.settings(context.run_config)
