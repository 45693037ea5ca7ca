"""Local Adam: every client keeps its own Adam state; only the models are averaged.

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

A baseline with one optimiser per client that lives as long as the run: with one client it is `torch.optim.Adam`. n_i
counts the client's steps over all its rounds. Kept slots are model-shaped, so n_i is stored once per coordinate, in the
slot `n`.

Kingma, Ba. "Adam: A Method for Stochastic Optimization". ICLR 2015. arXiv 1412.6980.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedlalr.algorithms.bias_correction import gathered
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.checks import check_betas, check_positive


@dataclass(frozen=True)
class LocalAdam:
    """Local Adam with state kept by each client, the clients' models averaged."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_betas(self.betas)
        check_positive("eps", self.eps)

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x",), up={"x": "mean"}, kept=("m", "v", "n"))

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return kept.replace(x=broadcast.x)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        beta1, beta2 = self.betas
        n = client.n + 1
        m = beta1 * client.m + (1 - beta1) * gradient
        v = beta2 * client.v + (1 - beta2) * gradient**2
        m_corrected = m / gathered(beta1, n)
        v_corrected = v / gathered(beta2, n)
        x = client.x - context.lr * m_corrected / (v_corrected.sqrt() + self.eps)
        return Slots(x=x, m=m, v=v, n=n)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return client.only("x"), client.only("m", "v", "n")

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return reduced
