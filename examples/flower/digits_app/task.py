"""What is trained, on which data, by which method. Server, nodes and simulator take it from here."""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import Context
from torch import nn

import fedlalr as fl


def data(context: Context) -> fl.data.Population:
    """The digits, dealt to the nodes; a node trains on the part of its own `partition-id` alone.

    Every node can do this because the digits come with the library. Where each owner has data of its own, give those:
    `return inputs, targets`, two tensors, or a torch data set.
    """
    config = context.run_config
    return fl.data.load("digits", clients=int(config["nodes"]), alpha=float(config["alpha"]), seed=int(config["seed"]))


def model(context: Context) -> nn.Module:
    """The network. The server's weights are the ones that count."""
    torch.manual_seed(int(context.run_config["seed"]))
    return fl.models.MLP(inputs=64, hidden=32, classes=10)


def algorithm(context: Context) -> fl.Algorithm:
    """Any method of the library: `fl.FedAvg(lr=0.1)`, `fl.SCAFFOLD(lr=0.1)`, …"""
    config = context.run_config
    return fl.FedLALR(
        lr=float(config["lr"]), momentum=str(config["momentum"]), second_moment=str(config["second-moment"])
    )


def settings(context: Context) -> dict[str, Any]:
    """Options of `fl.run`. With `**settings` they make the same run in the simulator."""
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
