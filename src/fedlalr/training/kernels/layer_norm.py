"""LayerNorm and RMSNorm of a stack of clients by Triton kernels: float32 or bfloat16 in, any of them out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedlalr.training.kernels.layer_norm_triton import norm_backward, norm_forward

WIDEST = 8192
"""The widest rows that a program can hold."""
SPAN = 64
"""Rows of one program in the backward pass."""


class StackedNorm(torch.autograd.Function):
    """Normalises rows `[C, N, D]`; weight and bias are `[C, D]`, or `[1, D]` if all clients share them, or None."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool, dtype: torch.dtype
    ) -> Tensor:
        x = x.contiguous()
        clients, rows, width = x.shape
        out = torch.empty_like(x, dtype=dtype)
        rstd = torch.empty(clients, rows, device=x.device, dtype=torch.float32)
        mean = torch.empty_like(rstd) if centred else None
        block, at_once = _tile(width)
        norm_forward[(-(-rows // at_once), clients)](
            x, weight, bias, out, mean, rstd, _stride(weight), _stride(bias), rows, width, eps,
            CENTRED=centred, SCALED=weight is not None, SHIFTED=bias is not None, ROWS=at_once, BLOCK=block,
        )  # fmt: skip
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.shifted = bias is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        clients, rows, width = x.shape
        slope, dx = slope.contiguous(), torch.empty_like(x)
        summed = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        pieces, (block, at_once) = -(-rows // SPAN), _tile(width)
        parts = torch.empty(2, clients, pieces, width, device=x.device) if summed else (None, None)
        norm_backward[(pieces, clients)](
            x, slope, weight, mean, rstd, dx, parts[0], parts[1], _stride(weight), rows, width,
            CENTRED=mean is not None, SCALED=weight is not None, SUMMED=summed, SPAN=SPAN, ROWS=at_once, BLOCK=block,
        )  # fmt: skip
        if not summed:
            return dx, None, None, None, None, None
        dweight, dbias = torch.as_tensor(parts).sum(2)
        return dx, dweight, dbias if ctx.shifted else None, None, None, None


def _tile(width: int) -> tuple[int, int]:
    """The columns and rows that a program holds at once."""
    block = 1 << (width - 1).bit_length()
    return block, max(2048 // block, 1)


def _stride(parameter: Tensor | None) -> int:
    return 0 if parameter is None or len(parameter) == 1 else parameter.stride(0)
