"""Batched matrix products with bfloat16 operands: one matrix for each client."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_WIDE_OUTPUT = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)


def product_float32(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of stacks in half precision, accumulated and returned in float32."""
    if a.is_cuda and _WIDE_OUTPUT:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()


def column_sums(a: Tensor) -> Tensor:
    """The sums over the rows of stacks `[C, N, D]` in half precision, in float32.

    On a GPU a product with ones reads memory faster than torch's sum.
    """
    if not a.is_cuda:
        return a.sum(1, dtype=torch.float32)
    return product_float32(a.new_ones(1, 8, a.shape[1]).expand(len(a), -1, -1), a)[:, 0]


class _Pointwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        half = weight.to(torch.bfloat16)
        ctx.save_for_backward(half, x)
        return torch.bmm(half, x.flatten(2)).view(*weight.shape[:2], *x.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        half, x = ctx.saved_tensors
        dy = dy.flatten(2)
        dx = torch.bmm(half.transpose(1, 2), dy).view(x.shape) if ctx.needs_input_grad[1] else None
        return product_float32(dy, x.flatten(2).transpose(1, 2)), dx


def pointwise(weight: Tensor, x: Tensor) -> Tensor:
    """A 1×1 convolution without bias: float32 `[C, E, D]` times bfloat16 maps `[C, D, B, H, W]`."""
    return _Pointwise.apply(weight, x)
