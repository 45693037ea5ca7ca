"""Gradient clipping and weight decay, applied around an algorithm's local step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Regularisation:
    """Clip the gradient to a norm, add L2 weight decay to it, and shrink x by decoupled weight decay."""

    clip_norm: float | None = None
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0
    decayed: Tensor | None = None
    """1 at the coordinates `[P]` that decoupled weight decay applies to, 0 elsewhere; None: to all."""

    def gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient `[…, P]` at x, clipped, with the weight decay added."""
        if self.clip_norm is not None:
            gradient = gradient * clip_factor(gradient, self.clip_norm)
        return gradient + self.weight_decay * x if self.weight_decay else gradient

    def shrinkage(self, lr: float | Tensor) -> float | Tensor:
        """The factor by which decoupled weight decay shrinks x."""
        rate = lr * self.decoupled_weight_decay
        return 1 - rate if self.decayed is None else 1 - rate * self.decayed

    def apply_(self, gradient: Tensor, x: Tensor, lr: float) -> None:
        """Clip and decay in place: overwrites the gradient, and x if the weight decay is decoupled."""
        if self.clip_norm is not None:
            gradient.mul_(clip_factor(gradient, self.clip_norm))
        if self.weight_decay:
            gradient.add_(x, alpha=self.weight_decay)
        if self.decoupled_weight_decay:
            x.mul_(self.shrinkage(lr))


def clip_factor(gradient: Tensor, most: float) -> Tensor:
    """The factor that clips the norm of a gradient `[…, P]` to `most`: `[…, 1]`, at most 1.

    If the squares overflow, as those of 1e20 do in float32, the norm is computed from scaled-down numbers. Otherwise
    the largest gradients would be clipped to zero, and training could never recover from them.
    """
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    factor: Tensor = most / norm.clamp(min=most)
    if norm.is_cpu and math.isfinite(norm.sum().item()):
        return factor  # only on a CPU: reading the norm on a GPU would synchronise
    small = torch.finfo(gradient.dtype).tiny ** 0.7  # scaled by it, the squares that overflowed stay in range
    shrunk = torch.linalg.vector_norm(gradient * small, dim=-1, keepdim=True)
    return torch.where(norm.isinf(), most * small / shrunk.clamp(min=most * small), factor)
