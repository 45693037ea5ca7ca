"""Local AMSGrad with a shared v̂: every client divides by the same second moment, frozen for the round.

    server:  m = 0, v = 0, v̂ = ε²                                              # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x,  m_i = m,  v_i = v                                        # start
            for k = 1 … K, with a fresh mini-batch gradient g:                 # step
                m_i = β1 m_i + (1 − β1) g
                v_i = β2 v_i + (1 − β2) g²
                x_i = x_i − α_t m_i / √v̂
            send x_i, m_i, v_i                                                 # finish
        x = mean x_i,  m = mean m_i,  v = mean v_i  over S                     # update
        v̂ = max(v̂, v)

v̂ belongs to the server and is broadcast with the rest; v_i continues from the averaged v, never from v̂. In the first
round the denominator is ε everywhere, so there ε sets the step size and is more than a guard against zero: keep it
large (1e-2), unlike FedLALR's.

Chen, Li, Li. "Toward Communication Efficient Adaptive Gradient Method". FODS 2020. arXiv 2109.05109.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.slots import Context, Reduction, Slots, SlotTable
from fedlalr.common.checks import squared
from fedlalr.common.option_types import Betas, Positive


@dataclass(frozen=True)
class SharedAMSGrad(FedAvg):
    """Local AMSGrad whose v̂ is shared by all clients and changes only at synchronisation."""

    lr: Positive = 1e-3
    betas: Betas = (0.9, 0.99)
    eps: Positive = 1e-2

    @property
    def slots(self) -> SlotTable:
        up: dict[str, Reduction] = {"x": "mean", "m": "mean", "v": "mean"}
        return SlotTable(down=("x", "m", "v", "v_hat"), up=up, relative=("v",))

    def init(self, params: Tensor) -> Slots:
        zero = torch.zeros_like(params)
        return Slots(x=params, m=zero, v=zero.clone(), v_hat=squared(self.eps, params))

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return broadcast.only("x", "m", "v")

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        beta1, beta2 = self.betas
        m = beta1 * client.m + (1 - beta1) * gradient
        v = beta2 * client.v + (1 - beta2) * gradient**2
        x = client.x - context.lr * m / broadcast.v_hat.sqrt()
        return Slots(x=x, m=m, v=v)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return reduced.replace(v_hat=torch.maximum(server.v_hat, reduced.v))
