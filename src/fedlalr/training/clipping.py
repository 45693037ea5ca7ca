"""How much shorter a gradient has to be."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def clip_factor(gradient: Tensor, most: float) -> Tensor:
    """What brings the norm of a gradient `[…, P]` down to `most` where it is above it: `[…, 1]`, at most one.

    A norm whose squares overflow, as those of 1e20 do in single precision, is taken of smaller numbers instead: else
    the longest gradients would be cut down to nothing, and what they come from could not be trained away.
    """
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    factor: Tensor = most / norm.clamp(min=most)
    if norm.is_cpu and math.isfinite(norm.sum().item()):
        return factor  # a GPU is not waited for
    small = torch.finfo(gradient.dtype).tiny ** 0.7  # squares of what made the norm overflow stay in range with it
    shrunk = torch.linalg.vector_norm(gradient * small, dim=-1, keepdim=True)
    return torch.where(norm.isinf(), most * small / shrunk.clamp(min=most * small), factor)
