"""SlowMo: local SGD, slow momentum on the server in units of the clients' learning rate.

    server:  u = 0                                                             # init
    for round t = 1, 2, …:
        each client i of the cohort S: K steps of SGD from x, sends Δ_i        # LocalSGD
        x̄ = x + mean Δ_i  over S                                               # update
        u = β u + (x − x̄) / η_t
        x = x − α η_t u

`alpha` is the slow learning rate, `beta` the slow momentum. u is divided by its own round's learning rate, so that old
momentum does not become too strong as the rate decays. α = 1, β = 0 is FedAvg.

Wang, Tantia, Ballas, Rabbat. "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum". ICLR
2020. arXiv 1910.00643.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.option_types import Fraction, Positive


@dataclass(frozen=True)
class SlowMo(LocalSGD):
    """Local SGD with slow momentum on the server."""

    lr: Positive = 0.1
    alpha: Positive = 1.0
    beta: Fraction = 0.7

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, u=torch.zeros_like(params))

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        u = self.beta * server.u - reduced.delta / context.lr
        return Slots(x=server.x - self.alpha * context.lr * u, u=u)
