"""FedAMS: local SGD, AMSGrad on the server, with two places for ε.

    server:  m = 0, v = 0, v̂ = 0                                               # init
    for round t = 1, 2, …:
        each client i of the cohort S: K steps of SGD from x, sends Δ_i        # LocalSGD
        Δ = mean Δ_i  over S                                                   # update
        m = β1 m + (1 − β1) Δ
        v = β2 v + (1 − β2) Δ²
        option 1 (FedAMSv1):  v̂ = max(v̂, v, ε),  x = x + η m / √v̂
        option 2 (FedAMSv2):  v̂ = max(v̂, v),     x = x + η m / (√v̂ + ε)

`server_lr` is η. ε stands under the root in option 1 and beside it in option 2: 1e-4 and 1e-2, the FedLALR paper's
values and the defaults here, are the same floor.

Wang, Lin, Chen. "Communication-Efficient Adaptive Federated Learning". ICML 2022. arXiv 2205.02719.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.checks import check_betas, check_choice, check_positive


@dataclass(frozen=True)
class FedAMS(LocalSGD):
    """Local SGD, the mean change fed to AMSGrad. Defaults are the FedLALR paper's for CIFAR-10."""

    lr: float = 0.1
    server_lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float | None = None
    """None: 1e-4 in option 1, 1e-2 in option 2."""
    option: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_positive("server_lr", self.server_lr)
        check_betas(self.betas)
        check_choice("option", self.option, (1, 2))
        if self.eps is not None:
            check_positive("eps", self.eps)

    def init(self, params: Tensor) -> Slots:
        zero = torch.zeros_like(params)
        return Slots(x=params, m=zero, v=zero.clone(), v_hat=zero.clone())

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        beta1, beta2 = self.betas
        m = beta1 * server.m + (1 - beta1) * reduced.delta
        v = beta2 * server.v + (1 - beta2) * reduced.delta**2
        v_hat = torch.maximum(server.v_hat, v)
        if self.option == 1:
            v_hat = v_hat.clamp(min=1e-4 if self.eps is None else self.eps)
            denominator = v_hat.sqrt()
        else:
            denominator = v_hat.sqrt() + (1e-2 if self.eps is None else self.eps)
        x = server.x + self.server_lr * m / denominator
        return Slots(x=x, m=m, v=v, v_hat=v_hat)
