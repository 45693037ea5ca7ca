"""A tiny problem that the nodes, the server and the simulator can all make by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import fedlalr as fl
from fedlalr.algorithms import registry

SIZES = (8, 14, 11)
CLIENTS = len(SIZES)


def data(client: int) -> tuple[Tensor, Tensor]:
    """The samples of one client."""
    generator = torch.Generator().manual_seed(client)
    targets = torch.randint(0, 3, (SIZES[client],), generator=generator)
    return torch.randn(SIZES[client], 5, generator=generator) + targets[:, None], targets


def model(hidden: int = 8) -> nn.Module:
    """A network with normalisation statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, hidden, bias=False), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 3))


def algorithm(config: Mapping[str, Any]) -> fl.Algorithm:
    """The method that the run's configuration names."""
    if config["algorithm"] == "fedlalr":
        return fl.FedLALR(lr=0.005, momentum=config["momentum"], second_moment=config["second-moment"])
    return registry.create(str(config["algorithm"]), lr=0.05)


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `fl.run`."""
    noise = float(config["noise"])
    private = {"clip": 0.1, "noise_multiplier": noise, "delta": 1e-3, "units": {"buffers": 1.0}}
    return {
        "rounds": int(config["rounds"]),
        "local": fl.Epochs(2),
        "batch_size": 4,
        "weight_decay": 1e-3,
        "schedule": fl.schedules.Exponential(0.9),
        "seed": 3,
        "device": "cpu",
        "min_clients": int(config["min-clients"]),
        "compression": config["compression"] or None,
        "privacy": private if noise else None,
        "stragglers": {"deadline": float(config["partial"])} if config["partial"] else None,
        "asynchronous": {"buffer": int(config["buffer"]), "concurrency": CLIENTS} if config["buffer"] else None,
    }
