"""MimeLite: clients step as the server's optimiser would, with its state frozen for the round.

    server:  m = 0 (base "adam": v = τ², too)                                  # init
    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x;  c_i = 0                                                  # start
            for k = 1 … K_i, with a fresh mini-batch gradient g at x_i:        # step
                u = (1 − β1) g + β1 m
                x_i = x_i − η_t u   (base "adam": x_i − η_t u / (√v + τ))
                c_i = c_i + the same mini-batch's gradient at x
            send x_i, c_i / K_i                                                # finish
        c = mean c_i / K_i  over S                                             # update
        m = (1 − β1) c + β1 m   (base "adam": v = (1 − β2) c² + β2 v, too)
        x = mean x_i  over S

c_i / K_i is the client's full gradient at x if its batches have one size and make up whole passes over its data, as
under `Epochs` with a batch size that divides the client's; otherwise it is an estimate. Every step takes two gradients.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh. "Breaking the centralized barrier for cross-device federated
learning". NeurIPS 2021. arXiv 2008.03606.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Betas, Checked, Positive


@dataclass(frozen=True)
class MimeLite(Checked):
    """Local steps with the server's momentum (`base="momentum"`) or Adam (`base="adam"`), its state frozen."""

    lr: Positive = 0.1
    betas: Betas = (0.9, 0.99)
    eps: Positive = 1e-3
    base: Literal["momentum", "adam"] = "momentum"

    @property
    def slots(self) -> SlotTable:
        state = ("m",) if self.base == "momentum" else ("m", "v")
        return SlotTable(down=("x", *state), up={"x": "mean", "c": "mean"}, gradients={"g_start": "x_start"})

    def init(self, params: Tensor) -> Slots:
        slots = Slots(x=params, m=torch.zeros_like(params))
        return slots if self.base == "momentum" else slots.replace(v=torch.full_like(params, self.eps**2))

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        nothing = torch.zeros_like(broadcast.x)
        return Slots(x=broadcast.x, c=nothing, x_start=broadcast.x, g_start=nothing)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        beta1, _ = self.betas
        direction = (1 - beta1) * gradient + beta1 * broadcast.m
        if self.base == "adam":
            direction = direction / (broadcast.v.sqrt() + self.eps)
        return client.replace(x=client.x - context.lr * direction, c=client.c + client.g_start)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return Slots(x=client.x, c=client.c / context.steps), Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        beta1, beta2 = self.betas
        new = Slots(x=reduced.x, m=(1 - beta1) * reduced.c + beta1 * server.m)
        return new if self.base == "momentum" else new.replace(v=(1 - beta2) * reduced.c**2 + beta2 * server.v)
