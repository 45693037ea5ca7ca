"""Local Adam, and with decoupled weight decay local AdamW: clients run Adam, and the models are averaged.

    every client keeps m_i = 0, v_i = 0, n_i = 0                               # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x                                                            # start
            for k = 1 … K, with a fresh mini-batch gradient g:                 # step
                n_i = n_i + 1
                m_i = β1 m_i + (1 − β1) g
                v_i = β2 v_i + (1 − β2) g²
                x_i = x_i − η_t [m_i / (1 − β1^n_i)] / (√[v_i / (1 − β2^n_i)] + ε)
            send x_i;  keep m_i, v_i, n_i                                      # finish
        x = mean x_i  over S                                                   # update

`moments` says what becomes of the Adam state between a client's rounds:
    "keep":     every client keeps its own, as above; with one client it is `torch.optim.Adam`. n_i counts the client's
                steps over all its rounds
    "restart":  m_i = v_i = n_i = 0 at every start; nothing is kept, only x is sent
    "average":  m_i = m, v_i = v, n_i = n at every start; m and v are averaged like x, n = n + mean K over S

`fl.run(…, decoupled_weight_decay=λ)` multiplies x by 1 − η_t λ before every step: this is local AdamW, and with one
client `torch.optim.AdamW`.

Kingma, Ba. "Adam: A Method for Stochastic Optimization". ICLR 2015. arXiv 1412.6980.
Loshchilov, Hutter. "Decoupled Weight Decay Regularization". ICLR 2019. arXiv 1711.05101.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlalr.algorithms.bias_correction import gathered
from fedlalr.algorithms.slots import Context, Reduction, Slots, SlotTable
from fedlalr.common.option_types import Betas, Checked, Positive


@dataclass(frozen=True)
class LocalAdam(Checked):
    """Local Adam whose state is kept by each client, restarted or averaged; the clients' models are averaged."""

    lr: Positive = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8
    moments: Literal["keep", "restart", "average"] = "keep"

    @property
    def slots(self) -> SlotTable:
        if self.moments == "average":
            up: dict[str, Reduction] = {"x": "mean", "m": "mean", "v": "mean"}
            return SlotTable(down=("x", "m", "v", "n"), up=up, relative=("v",), blocks=("n",))
        if self.moments == "keep":
            return SlotTable(down=("x",), up={"x": "mean"}, kept=("m", "v", "n"), counts=("n",))
        return SlotTable(down=("x",), up={"x": "mean"})

    def init(self, params: Tensor) -> Slots:
        zero = torch.zeros_like(params)
        return Slots(x=params, m=zero, v=zero, n=zero).only(*self.slots.down)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        if self.moments == "average":
            return broadcast
        if self.moments == "keep":
            return kept.replace(x=broadcast.x)
        zero = torch.zeros_like(broadcast.x)
        return Slots(x=broadcast.x, m=zero, v=zero, n=zero[..., :1])  # one count for all coordinates

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return adam_step(client, gradient, context.lr, self.betas, self.eps)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return client.only(*self.slots.up), client.only(*self.slots.kept)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return reduced.replace(n=server.n + context.steps) if self.moments == "average" else reduced


def adam_step(client: Slots, gradient: Tensor, lr: float | Tensor, betas: tuple[float, float], eps: float) -> Slots:
    """A step of Adam on x, m, v and the number of steps n."""
    beta1, beta2 = betas
    n = client.n + 1
    m = beta1 * client.m + (1 - beta1) * gradient
    v = beta2 * client.v + (1 - beta2) * gradient**2
    m_corrected = m / gathered(beta1, n)
    v_corrected = v / gathered(beta2, n)
    x = client.x - lr * m_corrected / (v_corrected.sqrt() + eps)
    return Slots(x=x, m=m, v=v, n=n)
