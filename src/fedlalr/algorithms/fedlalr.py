"""FedLALR: every client runs AMSGrad; weights, momentum and second moments are synchronised.

    server:  m = 0, v̂ = ε²                                                     # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x,  m_i = m,  v_i = v̂_i = v̂                                  # start
            for k = 1 … K_t, with a fresh mini-batch gradient g:               # step
                m_i = β1 m_i + (1 − β1) g
                v_i = β2 v_i + (1 − β2) g²
                v̂_i = max(v̂_i, v_i)
                x_i = x_i − α_t m_i / √v̂_i
            send x_i, m_i, v̂_i                                                 # finish
        x = mean x_i,  m = mean m_i,  v̂ = mean v̂_i  over S                     # update

Variants, which compose:
    momentum="restart":    m_i = 0 at every start; m is neither sent nor kept (Algorithm 2, Corollary 2)
    second_moment="max":   v̂ = max over S of v̂_i, per coordinate (Algorithm 3, Corollary 3)

There is no bias correction and no ε in the denominator: ε enters through the initial value ε², a floor that both max
and mean preserve.

`bias_correction=True` is another reading of the paper: its formulas have no correction, but the AMSGrad of the common
libraries, with which its experiments may have been run, has one. The rate of local step k is multiplied by
√(1 − β2^k) / (1 − β1^k), k counted from 1 in every round, and ε is added to √v̂.

Sun, Shen, Chen, Sun, Li, Sun, Tao. "FedLALR: Client-Specific Adaptive Learning Rates Achieve Linear Speedup for Non-IID
Data". arXiv 2309.09719.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.server_optimizers import corrected_rate
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.checks import squared
from fedlalr.common.option_types import Betas, Positive


@dataclass(frozen=True)
class FedLALR(FedAvg):
    """Local AMSGrad with synchronised x, m and v̂. Defaults are the paper's for CIFAR-10."""

    lr: Positive = 2e-3
    betas: Betas = (0.9, 0.995)
    eps: Positive = 1e-8
    momentum: Literal["average", "restart"] = "average"
    second_moment: Literal["mean", "max"] = "mean"
    bias_correction: bool = False

    @property
    def slots(self) -> SlotTable:
        if self.momentum == "restart":
            return SlotTable(down=("x", "v_hat"), up={"x": "mean", "v_hat": self.second_moment}, grows=("v_hat",))
        return SlotTable(
            down=("x", "m", "v_hat"), up={"x": "mean", "m": "mean", "v_hat": self.second_moment}, grows=("v_hat",)
        )

    def init(self, params: Tensor) -> Slots:
        state = Slots(x=params, m=torch.zeros_like(params), v_hat=squared(self.eps, params))
        return state.only(*self.slots.down)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        m = torch.zeros_like(broadcast.x) if self.momentum == "restart" else broadcast.m
        return Slots(x=broadcast.x, m=m, v=broadcast.v_hat, v_hat=broadcast.v_hat)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return amsgrad_step(client, gradient, context, self.betas, self.eps if self.bias_correction else None)


def amsgrad_step(
    client: Slots, gradient: Tensor, context: Context, betas: tuple[float, float], eps: float | None
) -> Slots:
    """A step of AMSGrad on x, m, v and v̂; with an ε beside the root, also with bias correction."""
    beta1, beta2 = betas
    m = beta1 * client.m + (1 - beta1) * gradient
    v = beta2 * client.v + (1 - beta2) * gradient**2
    v_hat = torch.maximum(client.v_hat, v)
    if eps is None:
        x = client.x - context.lr * m / v_hat.sqrt()
    else:
        x = client.x - corrected_rate(context.lr, betas, context.step) * m / (v_hat.sqrt() + eps)
    return Slots(x=x, m=m, v=v, v_hat=v_hat)
