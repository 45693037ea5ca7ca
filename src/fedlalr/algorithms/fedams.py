"""FedAMS: local SGD, AMSGrad on the server, with two places for ε.

    server:  m = 0, v = 0, v̂ = 0                                               # init
    for round t = 1, 2, …:
        each client i of the cohort S: K steps of SGD from x, sends Δ_i        # LocalSGD
        Δ = mean Δ_i  over S                                                   # update
        m = β1 m + (1 − β1) Δ
        v = β2 v + (1 − β2) Δ²
        option 1 (FedAMSv1):  v̂ = max(v̂, v, ε),  x = x + η m / √v̂
        option 2 (FedAMSv2):  v̂ = max(v̂, v),     x = x + η m / (√v̂ + ε)

`server_lr` is η. ε is inside the root in option 1 and outside it in option 2, so 1e-4 and 1e-2, the FedLALR paper's
values and our defaults, set the same floor.

`bias_correction=True` multiplies η by √(1 − β2^t) / (1 − β1^t), as torch's AMSGrad does: another reading of the FedLALR
paper's experiments. ε keeps its place.

Wang, Lin, Chen. "Communication-Efficient Adaptive Federated Learning". ICML 2022. arXiv 2205.02719.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.server_optimizers import amsgrad, corrected_rate, init_moments
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.option_types import Betas, Positive


@dataclass(frozen=True)
class FedAMS(LocalSGD):
    """Local SGD, the mean change fed to AMSGrad. Defaults are the FedLALR paper's for CIFAR-10."""

    lr: Positive = 0.1
    server_lr: Positive = 0.1
    betas: Betas = (0.9, 0.99)
    eps: Positive | None = None
    """None: 1e-4 in option 1, 1e-2 in option 2."""
    option: Literal[1, 2] = 1
    bias_correction: bool = False

    def init(self, params: Tensor) -> Slots:
        state = init_moments(params, 0.0)
        return state.replace(v_hat=state.v.clone())

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        eps = (1e-4 if self.option == 1 else 1e-2) if self.eps is None else self.eps
        floor, eps = (eps, 0.0) if self.option == 1 else (0.0, eps)
        rate = corrected_rate(self.server_lr, self.betas, context.round) if self.bias_correction else self.server_lr
        return amsgrad(server, reduced.delta, lr=rate, betas=self.betas, eps=eps, floor=floor)
