"""FedLADA: local AMSGrad from the averaged v̂, with the previous round's mean step mixed into every step.

    server:  v̂ = ε², g_a = 0                                                   # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x,  m_i = 0,  v_i = v̂_i = v̂                                  # start
            for k = 1 … K_i, with a fresh mini-batch gradient g:               # step
                m_i = β1 m_i + (1 − β1) g
                v_i = β2 v_i + (1 − β2) g²
                v̂_i = max(v̂_i, v_i)
                x_i = x_i − η_t (α m_i / √v̂_i + (1 − α) g_a)
            send x_i, v̂_i                                                      # finish
        g_a = (x − mean x_i) / (K η_t),  K the mean of K_i over S              # update
        x = mean x_i,  v̂ = mean v̂_i  over S

Clients send their models, so α = 1 is FedLALR with restarted momentum whatever the K_i. g_a is the mean over all local
steps of all clients; if the K_i are equal, that is the mean of the clients' mean steps. g_a is broadcast and never
sent back.

Sun, Shen, Sun, Ding, Tao. "Efficient Federated Learning via Local Adaptive Amended Optimizer with Linear Speedup".
IEEE TPAMI 2023. arXiv 2308.00522.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.checks import squared
from fedlalr.common.option_types import Betas, Positive, Share


@dataclass(frozen=True)
class FedLADA(FedAvg):
    """Local AMSGrad with restarted momentum, amended by the global mean step."""

    lr: Positive = 2e-3
    betas: Betas = (0.9, 0.995)
    eps: Positive = 1e-8
    alpha: Share = 0.1

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x", "v_hat", "g_a"), up={"x": "mean", "v_hat": "mean"}, grows=("v_hat",))

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, v_hat=squared(self.eps, params), g_a=torch.zeros_like(params))

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x, m=torch.zeros_like(broadcast.x), v=broadcast.v_hat, v_hat=broadcast.v_hat)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        beta1, beta2 = self.betas
        m = beta1 * client.m + (1 - beta1) * gradient
        v = beta2 * client.v + (1 - beta2) * gradient**2
        v_hat = torch.maximum(client.v_hat, v)
        x = client.x - context.lr * (self.alpha * m / v_hat.sqrt() + (1 - self.alpha) * broadcast.g_a)
        return Slots(x=x, m=m, v=v, v_hat=v_hat)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        g_a = (server.x - reduced.x) / (context.steps * context.lr)
        return Slots(x=reduced.x, v_hat=reduced.v_hat, g_a=g_a)
