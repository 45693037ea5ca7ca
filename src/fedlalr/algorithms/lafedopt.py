"""LAFedOpt: local Adam restarted every round, a server optimiser, and corrections for the clients' different scalings.

    server:  m = 0, v = ε_s²  (server="adam" only)                             # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x,  m_i = 0,  v_i = 0,  a = 0,  A_i = 0                      # start
            for k = 1 … K, with a fresh mini-batch gradient g:                 # step
                m_i = β1 m_i + (1 − β1) g
                v_i = β2 v_i + (1 − β2) g²
                x_i = x_i − η_t [m_i / (1 − β1^k)] / (√[v_i / (1 − β2^k)] + ε)
                a   = β1 a + (1 − β1) / (√v_i + ε),  A_i = A_i + a             (with a correction only)
            Δ_i = x_i − x                                                      # finish
            send Δ_i (none) | Δ_i / A_i (local) | Δ_i / A_i and 1 / A_i (joint)
        Δ = mean Δ_i (none) | mean Δ_i/A_i (local) | mean Δ_i/A_i / mean 1/A_i (joint)  over S       # update
        server="average":  x = x + η_s Δ
        server="adam":     m = β1_s m + (1 − β1_s) Δ,  v = β2_s v + (1 − β2_s) Δ²,  x = x + η_s m / (√v + ε_s)

0/0 counts as 0. A_i uses the raw v_i, without bias correction. `local` gives Δ the scale of a gradient, so `server_lr`
(η_s) needs retuning; `joint` restores the scale of a model change. The server's Adam is FedAdam's default: no bias
correction, v starts at ε_s².

Wang, Xu, Garrett, Charles, Liu, Joshi. "Local Adaptivity in Federated Learning: Convergence and Consistency". arXiv
2106.02305.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlalr.algorithms.server_optimizers import adam, init_moments
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Betas, Checked, Positive


@dataclass(frozen=True)
class LAFedOpt(Checked):
    """Local Adam, restarted every round, under a server optimiser. Defaults are the FedLALR paper's for CIFAR-10."""

    lr: Positive = 1e-4
    betas: Betas = (0.8, 0.999)
    eps: Positive = 1e-4
    server: Literal["average", "adam"] = "average"
    server_lr: Positive = 1.0
    correction: Literal["none", "local", "joint"] = "none"
    server_betas: Betas = (0.9, 0.99)
    server_eps: Positive = 1e-2

    @property
    def slots(self) -> SlotTable:
        if self.correction == "joint":
            both = ("delta", "inverse_A")
            return SlotTable(down=("x",), up=dict.fromkeys(both, "mean"), relative=both)
        return SlotTable(down=("x",), up={"delta": "mean"})

    @property
    def rates(self) -> tuple[str, ...]:
        """The rates worth tuning: a server that takes the mean has none."""
        return ("lr",) if self.server == "average" else ("lr", "server_lr")

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params) if self.server == "average" else init_moments(params, self.server_eps**2)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        zero = torch.zeros_like(broadcast.x)
        client = Slots(x=broadcast.x, m=zero, v=zero)
        return client if self.correction == "none" else client.replace(a=zero, A=zero)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        beta1, beta2 = self.betas
        m = beta1 * client.m + (1 - beta1) * gradient
        v = beta2 * client.v + (1 - beta2) * gradient**2
        m_corrected = m / (1 - beta1**context.step)
        v_corrected = v / (1 - beta2**context.step)
        x = client.x - context.lr * m_corrected / (v_corrected.sqrt() + self.eps)
        if self.correction == "none":
            return Slots(x=x, m=m, v=v)
        a = beta1 * client.a + (1 - beta1) / (v.sqrt() + self.eps)
        return Slots(x=x, m=m, v=v, a=a, A=client.A + a)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        delta = client.x - broadcast.x
        if self.correction == "none":
            return Slots(delta=delta), Slots()
        upload = Slots(delta=_quotient(delta, client.A))
        if self.correction == "joint":
            upload = upload.replace(inverse_A=_quotient(torch.ones_like(client.A), client.A))
        return upload, Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        delta = reduced.delta
        if self.correction == "joint":
            delta = _quotient(delta, reduced.inverse_A)
        if self.server == "average":
            return Slots(x=server.x + self.server_lr * delta)
        return adam(server, delta, lr=self.server_lr, betas=self.server_betas, eps=self.server_eps)


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Element-wise quotient, 0 where the denominator is 0: a client without a step has Δ_i = A_i = 0."""
    return (numerator / denominator).masked_fill(denominator == 0, 0.0)
