"""Cross-entropy of rows of logits by Triton kernels, without a copy of the logits in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedlalr.training.kernels.cross_entropy_triton import entropy_backward, entropy_forward


class RowsCrossEntropy(torch.autograd.Function):
    """The loss of each row of logits `[R, V]`, float32 `[R]`; 0 where the target is `ignored`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        rows, classes = logits.shape
        losses = torch.empty(rows, device=logits.device)
        levels = torch.empty_like(losses)
        targets = targets.contiguous()
        block, warps = _block(classes)
        entropy_forward[(rows,)](
            logits, targets, losses, levels, logits.stride(0), classes, ignored, BLOCK=block, num_warps=warps
        )
        ctx.save_for_backward(logits, targets, levels)
        ctx.ignored = ignored
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, levels = ctx.saved_tensors
        rows, classes = logits.shape
        stride = logits.stride(0)  # rows that a product has aligned stay aligned for the next one
        gradient = torch.empty_strided((rows, classes), (stride, 1), dtype=logits.dtype, device=logits.device)
        block, warps = _block(classes)
        entropy_backward[(rows,)](
            logits, targets, levels, slopes.contiguous(), gradient, stride, stride, classes, ctx.ignored,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
        return gradient, None, None


def _block(classes: int) -> tuple[int, int]:
    """The columns that a program holds at once, and its warps."""
    block = min(1 << (classes - 1).bit_length(), 4096)
    return block, max(block // 512, 1)
