"""FedAdamW: local AdamW from averaged second moments, every step aligned with the server's last change.

    server:  v = 0, t = 0, d = 0                                               # init
    for each round:
        each client i of the cohort S:
            x_i = x,  m_i = 0,  v_i = v                                        # start
            for k = 1 … K_i, with a fresh mini-batch gradient g:               # step
                m_i = β1 m_i + (1 − β1) g
                v_i = β2 v_i + (1 − β2) g²
                x_i = x_i − η [m_i / (1 − β1^k)] / (√[v_i / (1 − β2^(t + k))] + ε) + (γ / K_i) d
            send x_i and the mean of v_i over each parameter tensor            # finish
        d = mean x_i − x,  t = t + mean K_i  over S                            # update
        x = mean x_i,  v = mean of the block means  over S

`align` is γ. For decoupled weight decay, pass `decoupled_weight_decay` to `fl.run` (0.01 in the authors' code). t is
the number of steps behind v: v is corrected as one average that runs through all rounds, and m as one that restarts.

The paper takes one block for the Q, K, V and projection of each attention head and for each other layer; here a block
is a parameter tensor. v and t travel as one number for each, so a client sends one vector and a few numbers. The
authors' public code differs: it sends the whole v (`blocks=False`) and corrects m with t + k as well.

Liu, Shang, Zhu, Liu, Liu, Liu. "FedAdamW: A Communication-Efficient Optimizer with Convergence and Generalization
Guarantees for Federated Large Models". arXiv 2510.27486.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.bias_correction import gathered
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Betas, Checked, Fraction, Positive


@dataclass(frozen=True)
class FedAdamW(Checked):
    """Local Adam from the mean v of each layer, with alignment. Defaults are the authors'."""

    lr: Positive = 3e-4
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8
    align: Fraction = 0.5
    blocks: bool = True

    @property
    def slots(self) -> SlotTable:
        return SlotTable(
            down=("x", "v", "t", "d") if self.align else ("x", "v", "t"),
            up={"x": "mean", "v": "mean"},
            relative=("v",),
            blocks=("v", "t") if self.blocks else ("t",),
        )

    def init(self, params: Tensor) -> Slots:
        zero = torch.zeros_like(params)
        return Slots(x=params, v=zero, t=zero, d=zero).only(*self.slots.down)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x, m=torch.zeros_like(broadcast.x), v=broadcast.v)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        beta1, beta2 = self.betas
        m = beta1 * client.m + (1 - beta1) * gradient
        v = beta2 * client.v + (1 - beta2) * gradient**2
        m_corrected = m / gathered(beta1, context.step)
        v_corrected = v / gathered(beta2, broadcast.t + context.step)
        x = client.x - context.lr * m_corrected / (v_corrected.sqrt() + self.eps)
        if self.align:
            x = x + self.align / context.steps * broadcast.d
        return Slots(x=x, m=m, v=v)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return client.only("x", "v"), Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        after = reduced.replace(t=server.t + context.steps)
        return after.replace(d=reduced.x - server.x) if self.align else after
