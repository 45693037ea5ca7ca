"""FedYogi: local SGD, Yogi on the server.

    server:  m = 0, v = τ²                                                     # init
    for round t = 1, 2, …:
        each client i of the cohort S: K steps of SGD from x, sends Δ_i        # LocalSGD
        Δ = mean Δ_i  over S                                                   # update
        m = β1 m + (1 − β1) Δ
        v = v − (1 − β2) Δ² sign(v − Δ²)
        x = x + η m / (√v + τ)

`eps` is τ, `server_lr` is η, `initial_v` is the initial v (None: τ²).

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. "Adaptive Federated Optimization". ICLR 2021. arXiv
2003.00295.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.server_optimizers import init_moments, yogi
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.option_types import Betas, NotNegative, Positive


@dataclass(frozen=True)
class FedYogi(LocalSGD):
    """Local SGD, the mean change fed to Yogi."""

    lr: Positive = 0.0316
    server_lr: Positive = 1e-2
    betas: Betas = (0.9, 0.99)
    eps: Positive = 1e-3
    initial_v: NotNegative | None = None

    def init(self, params: Tensor) -> Slots:
        return init_moments(params, self.eps**2 if self.initial_v is None else self.initial_v)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return yogi(server, reduced.delta, lr=self.server_lr, betas=self.betas, eps=self.eps)
