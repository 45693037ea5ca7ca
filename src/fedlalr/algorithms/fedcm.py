"""FedCM: local SGD that mixes the previous round's mean direction into every step.

    server:  Δ̄ = 0                                                             # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x                                                            # start
            for k = 1 … K_i, with a fresh mini-batch gradient g:               # step
                x_i = x_i − η_t (α g + (1 − α) Δ̄)
            send Δ̄_i = (x − x_i) / (K_i η_t)                                   # finish
        Δ̄ = mean Δ̄_i  over S                                                   # update
        x = x − η_t K Δ̄,  K the mean of K_i over S

Each client sends one vector. If all K_i are equal, the last line is the mean of the clients' models; if they differ,
every client counts with its mean step, however many it took. The slot of Δ̄ is `direction`.

Xu, Wang, Wang, Yao. "FedCM: Federated Learning with Client-level Momentum". arXiv 2106.10874.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Positive, Share


@dataclass(frozen=True)
class FedCM(FedAvg):
    """Local SGD with client-level momentum; alpha = 1 is plain local SGD."""

    lr: Positive = 0.1
    alpha: Share = 0.1

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x", "direction"), up={"direction": "mean"})

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, direction=torch.zeros_like(params))

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return Slots(x=client.x - context.lr * (self.alpha * gradient + (1 - self.alpha) * broadcast.direction))

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return Slots(direction=(broadcast.x - client.x) / (context.steps * context.lr)), Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        x = server.x - context.lr * context.steps * reduced.direction
        return Slots(x=x, direction=reduced.direction)
