"""Model, data, method and settings, for the server, the nodes and the simulator."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import Context
from torch import nn

import fedlalr as fl


def data(context: Context) -> fl.data.Population:
    """The digits, partitioned over the nodes; a node trains only on the part of its `partition-id`.

    Every node can load them because scikit-learn includes the digits. If every node has its own data, return that:
    `return inputs, targets`, two tensors, or a torch data set.
    """
    config = context.run_config
    return fl.data.load("digits", clients=int(config["nodes"]), alpha=float(config["alpha"]), seed=int(config["seed"]))


def model(context: Context) -> nn.Module:
    """The model. Only the server's initial weights are used."""
    torch.manual_seed(int(context.run_config["seed"]))
    return fl.models.MLP(inputs=64, hidden=32, classes=10)


def algorithm(context: Context) -> fl.Algorithm:
    """Any method of the library: `fl.FedAvg(lr=0.1)`, `fl.SCAFFOLD(lr=0.1)`, …"""
    config = context.run_config
    return fl.FedLALR(
        lr=float(config["lr"]), momentum=str(config["momentum"]), second_moment=str(config["second-moment"])
    )


def settings(context: Context) -> dict[str, Any]:
    """Options of `fl.run`; `**settings` gives the same run in the simulator."""
    config = context.run_config
    run_dir = str(config["run-dir"])
    return {
        "rounds": int(config["rounds"]),
        "local": fl.Epochs(int(config["local-epochs"])),
        "batch_size": int(config["batch-size"]),
        "seed": int(config["seed"]),
        "min_clients": int(config["min-clients"]),
        "device": "cpu",
        **({"run_dir": run_dir, "resume": True} if run_dir else {}),
    }
