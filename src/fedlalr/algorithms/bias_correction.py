"""Adam's bias correction: averages that start at zero are divided by the weight that they have gathered."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gathered(beta: float, step: float | Tensor) -> float | Tensor:
    """1 − βᵏ. For a tensor k as `expm1`: in float32, two numbers near 1 would cancel half of the digits or more."""
    if not isinstance(step, Tensor):
        return 1 - float(beta**step)
    return -torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step)


def corrected_rate(lr: float | Tensor, betas: tuple[float, float], step: float | Tensor) -> float | Tensor:
    """α √(1 − β2ᵏ) / (1 − β1ᵏ): the rate with which a step along m / √v has both averages corrected."""
    return lr * gathered(betas[1], step) ** 0.5 / gathered(betas[0], step)
