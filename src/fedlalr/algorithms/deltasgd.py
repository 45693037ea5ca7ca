"""Δ-SGD: local SGD in which each client tunes its own step size from how fast its gradient changes.

    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x;  η = η_t, θ = 1                                           # start
            for k = 1 … K_i, with a fresh mini-batch gradient g at x_i:        # step
                from the second step on, with g⁻ the same mini-batch's gradient at x_i⁻:
                    η⁺ = min(γ ‖x_i − x_i⁻‖ / (2 ‖g − g⁻‖), √(1 + δθ) η)
                    θ = η⁺ / η;  η = η⁺
                x_i⁻ = x_i;  x_i = x_i − η g
            send x_i                                                           # finish
        x = mean x_i  over S                                                   # update

‖x_i − x_i⁻‖ / ‖g − g⁻‖ estimates 1/L of the client's own loss at x_i. If either norm is zero, it says nothing about L,
and only the second bound applies. A step with a zero gradient leaves η unchanged; otherwise η would grow without bound
where there is nothing to learn. Every step takes two gradients. η_t only sets the first step size of a round, so
learning-rate decay matters little. Defaults are the paper's.

Kim, Toghani, Uribe, Kyrillidis. "Adaptive Federated Learning with Auto-Tuned Clients". ICLR 2024. arXiv 2306.11201.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import NotNegative, Positive


@dataclass(frozen=True)
class DeltaSGD(FedAvg):
    """Local SGD in which each client tunes its own step size, afresh in every round; `lr` is the first step's."""

    lr: Positive = 0.2
    gamma: Positive = 2.0
    delta: NotNegative = 0.1

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x",), up={"x": "mean"}, gradients={"g_before": "x_before"})

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        x, one = broadcast.x, broadcast.x[..., :1]  # η and θ are one number for all coordinates
        eta, theta = torch.zeros_like(one), torch.ones_like(one)
        return Slots(x=x, x_here=x, x_before=x, g_before=torch.zeros_like(x), eta=eta, theta=theta)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        # The gradients were taken at x_here and x_before; decoupled weight decay has moved x since.
        moved, turned = _norm(client.x_here - client.x_before), _norm(gradient - client.g_before)
        most = torch.sqrt(1 + self.delta * client.theta) * client.eta
        smooth = torch.where((moved > 0) & (turned > 0), self.gamma * moved / (2 * turned), most)
        found = torch.minimum(smooth, most).clamp(min=torch.finfo(client.eta.dtype).tiny)  # η = 0 marks the first step
        first, idle = client.eta == 0, _norm(gradient) == 0
        eta = torch.where(first, context.lr, torch.where(idle, client.eta, found))
        theta = torch.where(first, client.theta, eta / client.eta)
        x = client.x - eta * gradient
        return client.replace(x=x, x_here=x, x_before=client.x_here, eta=eta, theta=theta)


def _norm(vector: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    return norm
