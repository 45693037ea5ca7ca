"""Local AdaAlter: Adagrad whose denominator is frozen between synchronisations.

    server:  A = initial                                                       # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x,  A_i = B = A                                              # start
            for k = 1 … K, with a fresh mini-batch gradient g:                 # step
                x_i = x_i − η_t g / √(B + k ε²)
                A_i = A_i + g²
            send x_i, A_i                                                      # finish
        x = mean x_i,  A = mean A_i  over S                                    # update

B is the broadcast A: it is constant within the round, and k ε² stands in for the squares not yet synchronised. The
paper writes A² and B² for our A and B.

Xie, Koyejo, Gupta, Lin. "Local AdaAlter: Communication-Efficient Stochastic Gradient Descent with Adaptive Learning
Rates". arXiv 1911.09030.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Positive


@dataclass(frozen=True)
class LocalAdaAlter(FedAvg):
    """Local Adagrad steps under a synchronised denominator."""

    lr: Positive = 0.5
    eps: Positive = 1.0
    initial: Positive = 1.0

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x", "A"), up={"x": "mean", "A": "mean"}, grows=("A",))

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, A=torch.full_like(params, self.initial))

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x, A=broadcast.A)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        B = broadcast.A
        x = client.x - context.lr * gradient / (B + context.step * self.eps**2).sqrt()
        return Slots(x=x, A=client.A + gradient**2)
