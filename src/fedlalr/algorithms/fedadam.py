"""FedAdam: local SGD, Adam on the server.

    server:  m = 0, v = τ²                                                     # init
    for round t = 1, 2, …:
        each client i of the cohort S: K steps of SGD from x, sends Δ_i        # LocalSGD
        Δ = mean Δ_i  over S                                                   # update
        m = β1 m + (1 − β1) Δ
        v = β2 v + (1 − β2) Δ²
        x = x + η m / (√v + τ)

`eps` is τ, `server_lr` is η, `initial_v` is the initial v (None: τ²). As in Algorithm 2 of the paper there is no bias
correction by default.
    bias_correction=True:      η is multiplied by √(1 − β2^t) / (1 − β1^t)
    bias_correction="flower":  the same with exponent t + 1
τ is added to the uncorrected √v in all three, as in Keras, TensorFlow Federated and Flower.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan. "Adaptive Federated Optimization". ICLR 2021. arXiv
2003.00295.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.server_optimizers import adam, corrected_rate, init_moments
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.option_types import Betas, NotNegative, Positive


@dataclass(frozen=True)
class FedAdam(LocalSGD):
    """Local SGD, the mean change fed to Adam. Defaults are the FedLALR paper's for CIFAR-10."""

    lr: Positive = 0.1
    server_lr: Positive = 1.0
    betas: Betas = (0.9, 0.99)
    eps: Positive = 1e-2
    bias_correction: Literal[False, True, "flower"] = False
    initial_v: NotNegative | None = None

    def init(self, params: Tensor) -> Slots:
        return init_moments(params, self.eps**2 if self.initial_v is None else self.initial_v)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        t = context.round + (self.bias_correction == "flower")
        rate = corrected_rate(self.server_lr, self.betas, t) if self.bias_correction else self.server_lr
        return adam(server, reduced.delta, lr=rate, betas=self.betas, eps=self.eps)
