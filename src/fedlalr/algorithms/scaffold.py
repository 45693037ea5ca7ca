"""SCAFFOLD, option II: local SGD with control variates kept by the clients.

    server:  c = 0;  every client keeps c_i = 0                                # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x                                                            # start
            for k = 1 … K_i, with a fresh mini-batch gradient g:               # step
                x_i = x_i − η_t (g − c_i + c)
            c_i⁺ = c_i − c + (x − x_i) / (K_i η_t)                             # finish
            send x_i, c_i⁺ − c_i;  keep c_i⁺
        x = mean x_i  over S                                                   # update
        c = c + |S|/N mean (c_i⁺ − c_i)  over S,  N clients in all

With the uniform mean the last line is c + (1/N) Σ (c_i⁺ − c_i): |S| counts the accepted replies. A client whose reply
is rejected keeps its old c_i. If the server clips c_i⁺ − c_i, or a codec rounds it, c_i changes by what the server
takes, so c stays the mean of all c_i, except with `privacy` or another reduction than the mean. The paper's server
learning rate is fixed at 1.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning".
ICML 2020. arXiv 1910.06378.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Context, Reduction, Slots, SlotTable
from fedlalr.common.option_types import Checked, Positive


@dataclass(frozen=True)
class SCAFFOLD(Checked):
    """Local SGD corrected by control variates c (server) and c_i (kept by each client)."""

    lr: Positive = 0.1

    @property
    def slots(self) -> SlotTable:
        up: dict[str, Reduction] = {"x": "mean", "delta_c": "mean"}
        return SlotTable(down=("x", "c"), up=up, kept=("c_i",), follows=("c_i", "delta_c"))

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, c=torch.zeros_like(params))

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x, c_i=kept.c_i)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return client.replace(x=client.x - context.lr * (gradient - client.c_i + broadcast.c))

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        delta_c = (broadcast.x - client.x) / (context.steps * context.lr) - broadcast.c
        return Slots(x=client.x, delta_c=delta_c), Slots(c_i=client.c_i + delta_c)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        share = context.cohort / context.population
        return Slots(x=reduced.x, c=server.c + share * reduced.delta_c)
