"""FedAdagrad: local SGD, Adagrad on the server.

    server:  m = 0, v = τ²                                                     # init
    for round t = 1, 2, …:
        each client i of the cohort S: K steps of SGD from x, sends Δ_i        # LocalSGD
        Δ = mean Δ_i  over S                                                   # update
        m = β1 m + (1 − β1) Δ
        v = v + Δ²
        x = x + η m / (√v + τ)

`eps` is τ, `server_lr` is η, `initial_v` is the initial v (None: τ²). With β1 = 0, the default, m = Δ.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. "Adaptive Federated Optimization". ICLR 2021. arXiv
2003.00295.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.server_optimizers import adagrad, init_moments
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.option_types import Fraction, NotNegative, Positive


@dataclass(frozen=True)
class FedAdagrad(LocalSGD):
    """Local SGD, the mean change fed to Adagrad."""

    lr: Positive = 0.0316
    server_lr: Positive = 0.1
    beta1: Fraction = 0.0
    eps: Positive = 1e-3
    initial_v: NotNegative | None = None

    def init(self, params: Tensor) -> Slots:
        return init_moments(params, self.eps**2 if self.initial_v is None else self.initial_v)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return adagrad(server, reduced.delta, lr=self.server_lr, beta1=self.beta1, eps=self.eps)
