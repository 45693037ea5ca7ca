"""Server optimisers: pure functions from the server's slots and the cohort's mean change Δ to the server's next slots.

    momentum:  m = β m + Δ,               x = x + η m
    nesterov:  m = β m + Δ,               x = x + η (Δ + β m)
    all others:  m = β1 m + (1 − β1) Δ,   x = x + η m / (√v + ε)   with
        adam:     v = β2 v + (1 − β2) Δ²
        yogi:     v = v − (1 − β2) Δ² sign(v − Δ²)
        adagrad:  v = v + Δ²
        amsgrad:  v as in adam, v̂ = max(v̂, v, floor), and √v̂ in the place of √v

Δ points downhill, so x moves along it. There is no bias correction in these: a method that wants one
scales η by `corrected_rate`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots


def init_moments(params: Tensor, initial_v: float) -> Slots:
    """x, m = 0 and v = `initial_v` in every coordinate."""
    return Slots(x=params, m=torch.zeros_like(params), v=torch.full_like(params, initial_v))


def momentum(server: Slots, delta: Tensor, *, lr: float, beta: float) -> Slots:
    """Heavy-ball momentum; Δ enters m in full."""
    m = beta * server.m + delta
    return Slots(x=server.x + lr * m, m=m)


def nesterov(server: Slots, delta: Tensor, *, lr: float, beta: float) -> Slots:
    """Nesterov momentum as in `torch.optim.SGD(nesterov=True)`, whose gradient is −Δ."""
    m = beta * server.m + delta
    return Slots(x=server.x + lr * (delta + beta * m), m=m)


def adam(server: Slots, delta: Tensor, *, lr: float | Tensor, betas: tuple[float, float], eps: float) -> Slots:
    """Adam without bias correction."""
    v = moving_average(server.v, delta**2, betas[1])
    return _scaled_step(server, delta, v, lr, betas[0], eps)


def yogi(server: Slots, delta: Tensor, *, lr: float, betas: tuple[float, float], eps: float) -> Slots:
    """Yogi: v moves towards Δ² by (1 − β2) Δ², whatever the distance."""
    square = delta**2
    v = server.v - (1 - betas[1]) * square * torch.sign(server.v - square)
    return _scaled_step(server, delta, v, lr, betas[0], eps)


def adagrad(server: Slots, delta: Tensor, *, lr: float, beta1: float, eps: float) -> Slots:
    """Adagrad with momentum."""
    return _scaled_step(server, delta, server.v + delta**2, lr, beta1, eps)


def amsgrad(
    server: Slots, delta: Tensor, *, lr: float | Tensor, betas: tuple[float, float], eps: float, floor: float
) -> Slots:
    """AMSGrad; `floor` bounds v̂ from below."""
    v = moving_average(server.v, delta**2, betas[1])
    v_hat = torch.maximum(server.v_hat, v).clamp(min=floor)
    return _scaled_step(server, delta, v_hat, lr, betas[0], eps).replace(v=v, v_hat=v_hat)


def moving_average(old: Tensor, new: Tensor, beta: float) -> Tensor:
    """β old + (1 − β) new."""
    return beta * old + (1 - beta) * new


def _scaled_step(server: Slots, delta: Tensor, v: Tensor, lr: float | Tensor, beta1: float, eps: float) -> Slots:
    m = moving_average(server.m, delta, beta1)
    return Slots(x=server.x + lr * m / (v.sqrt() + eps), m=m, v=v)


def gathered(beta: float, step: float | Tensor) -> float | Tensor:
    """1 − βᵏ. For a tensor k as `expm1`: in float32, two numbers near 1 would cancel half of the digits or more."""
    if not isinstance(step, Tensor):
        return 1 - float(beta**step)
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def corrected_rate(lr: float | Tensor, betas: tuple[float, float], step: float | Tensor) -> float | Tensor:
    """α √(1 − β2ᵏ) / (1 − β1ᵏ): the rate with which a step along m / √v has both averages corrected."""
    return lr * gathered(betas[1], step) ** 0.5 / gathered(betas[0], step)
