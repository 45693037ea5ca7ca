"""AlignedLALR: FedLALR with restarted momentum, and the server's last change mixed into every local step.

    server:  v̂ = ε², d = 0                                                     # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x,  m_i = 0,  v_i = v̂_i = v̂                                  # start
            for k = 1 … K_i, with a fresh mini-batch gradient g:               # step
                m_i = β1 m_i + (1 − β1) g
                v_i = β2 v_i + (1 − β2) g²
                v̂_i = max(v̂_i, v_i)
                x_i = x_i − α_t m_i / √v̂_i + (γ / K_i) d
            send x_i, v̂_i                                                      # finish
        d = mean x_i − x                                                       # update
        x = mean x_i,  v̂ = max(ε², κ max (or mean) v̂_i)  over S

`align` is γ: over a round every client repeats γ of the server's last change, so that d is a momentum across rounds.
`keep` is κ: with κ < 1, v̂ forgets old gradients. The server shrinks it, so a reply still never lies below the
broadcast. With γ = 0, d is neither stored nor sent; with γ = 0 and κ = 1 the method is FedLALR with
`momentum="restart"`, to the bit.

`bias_correction` multiplies the rate of local step k by √(1 − β2^k) / (1 − β1^k) and adds ε to √v̂, as in FedLALR.

A method of this library. The alignment term is that of FedCM (arXiv 2106.10874) and FedAdamW (arXiv 2510.27486).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.fedlalr import amsgrad_step
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.checks import squared
from fedlalr.common.option_types import Betas, Fraction, Positive, Share


@dataclass(frozen=True)
class AlignedLALR(FedAvg):
    """Local AMSGrad from the synchronised v̂, every step aligned with the server's last change."""

    lr: Positive = 2e-3
    betas: Betas = (0.9, 0.995)
    eps: Positive = 1e-8
    align: Fraction = 0.5
    keep: Share = 1.0
    second_moment: Literal["mean", "max"] = "max"
    bias_correction: bool = False

    @property
    def slots(self) -> SlotTable:
        return SlotTable(
            down=("x", "v_hat", "d") if self.align else ("x", "v_hat"),
            up={"x": "mean", "v_hat": self.second_moment},
            grows=("v_hat",),
        )

    def init(self, params: Tensor) -> Slots:
        state = Slots(x=params, v_hat=squared(self.eps, params), d=torch.zeros_like(params))
        return state.only(*self.slots.down)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x, m=torch.zeros_like(broadcast.x), v=broadcast.v_hat, v_hat=broadcast.v_hat)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        new = amsgrad_step(client, gradient, context, self.betas, self.eps if self.bias_correction else None)
        return new.replace(x=new.x + self.align / context.steps * broadcast.d) if self.align else new

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        after = reduced.replace(v_hat=(self.keep * reduced.v_hat).clamp(min=self.eps**2))
        return after.replace(d=reduced.x - server.x) if self.align else after
