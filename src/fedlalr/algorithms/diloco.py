"""DiLoCo: clients run AdamW for many steps and keep its state; the server applies Nesterov momentum to the mean change.

    server:  m = 0                                                             # init
    every client keeps m_i = 0, v_i = 0, n_i = 0
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x                                                            # start
            for k = 1 … H, with a fresh mini-batch gradient g:                 # step
                a step of Adam on x_i, m_i, v_i, n_i, as in LocalAdam
            send Δ_i = x_i − x;  keep m_i, v_i, n_i                            # finish
        Δ = mean Δ_i  over S                                                   # update
        m = µ m + Δ
        x = x + η (Δ + µ m)

`server_lr` is η, `momentum` is µ. µ = 0 with η = 1 is LocalAdam. For AdamW, pass `decoupled_weight_decay` to `fl.run`;
H is `local=fl.Steps(H)`, 500 in the paper. The server's step is that of `torch.optim.SGD(nesterov=True)` on the
gradient −Δ.

The betas are Adam's. The public implementation of Prime Intellect (`diloco_simple`) has our other defaults, but betas
of (0.9, 0.95), a weight decay of 0.01, clipping to norm 1 and a rate that warms up and then falls.

Douillard et al. "DiLoCo: Distributed Low-Communication Training of Language Models". arXiv 2311.08105.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.localadam import adam_step
from fedlalr.algorithms.server_optimizers import nesterov
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Betas, Checked, Fraction, Positive


@dataclass(frozen=True)
class DiLoCo(Checked):
    """Local Adam with kept state under a Nesterov server."""

    lr: Positive = 4e-4
    betas: Betas = (0.9, 0.999)
    eps: Positive = 1e-8
    server_lr: Positive = 0.7
    momentum: Fraction = 0.9

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x",), up={"delta": "mean"}, kept=("m", "v", "n"), counts=("n",))

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, m=torch.zeros_like(params))

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return kept.replace(x=broadcast.x)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return adam_step(client, gradient, context.lr, self.betas, self.eps)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return Slots(delta=client.x - broadcast.x), client.only(*self.slots.kept)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return nesterov(server, reduced.delta, lr=self.server_lr, beta=self.momentum)
