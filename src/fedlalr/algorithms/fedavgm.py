"""FedAvgM: local SGD, momentum on the server.

    server:  m = 0                                                             # init
    for round t = 1, 2, …:
        each client i of the cohort S: K steps of SGD from x, sends Δ_i        # LocalSGD
        Δ = mean Δ_i  over S                                                   # update
        m = β m + Δ
        x = x + η m

`momentum` is β, `server_lr` is η. Δ enters m in full, not as (1 − β) Δ; β = 0 with η = 1 is FedAvg.

Hsu, Qi, Brown. "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification".
arXiv 1909.06335.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.server_optimizers import momentum
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.option_types import Fraction, Positive


@dataclass(frozen=True)
class FedAvgM(LocalSGD):
    """Local SGD, the mean change accumulated in a server momentum."""

    lr: Positive = 0.1
    server_lr: Positive = 1.0
    momentum: Fraction = 0.9

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, m=torch.zeros_like(params))

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return momentum(server, reduced.delta, lr=self.server_lr, beta=self.momentum)
