"""A noisy non-convex problem with known constants, for any number of clients.

    f(x)   = Σ_j ½ x_j² / (1 + x_j²)          concave beyond |x_j| = 1/√3, L = 1, f* = 0 at the origin
    f_i(x) = f(x) + Σ_j b_ij x_j              b_ij = ±shift, in pairs of clients that cancel: the mean of f_i is f
    g      = ∇f_i(x) + u                      u uniform in [−noise, noise] in every coordinate

A single client has no shift, since it has no partner to cancel it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Synthetic:
    """The problem's size and scales. All clients start at x_j = start."""

    d: int = 8
    start: float = 1.5
    shift: float = 0.25
    noise: float = 1.0

    def gradient(self, x: Tensor) -> Tensor:
        """∇f, for points of any shape `[…, d]`."""
        return x / (1 + x**2) ** 2

    def shifts(self, clients: int, repeats: int, generator: np.random.Generator) -> Tensor:
        """b for every client, `[repeats, clients, d]`, summing to exactly zero over the clients."""
        if clients > 1 and clients % 2:
            raise ValueError(f"clients come in pairs whose shifts cancel: use 1 or an even number, not {clients}")
        signs = torch.from_numpy(generator.choice((-1.0, 1.0), size=(repeats, clients // 2, self.d)))
        lonely = torch.zeros(repeats, clients % 2, self.d, dtype=torch.float64)
        return torch.cat([lonely, signs * self.shift, signs * -self.shift], dim=1)

    def noises(self, shape: tuple[int, ...], generator: np.random.Generator) -> Tensor:
        """Uniform noise of the given shape."""
        return torch.from_numpy(generator.random(shape)).mul_(2 * self.noise).sub_(self.noise)
