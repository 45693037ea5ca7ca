"""Cross-entropy of rows of logits by Triton kernels, without a copy of the logits in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedlalr.training.kernels.cross_entropy_triton import entropy_backward, entropy_forward


class _RowsCrossEntropy(torch.autograd.Function):
    """Losses and log Σ exp of rows `[R, V]`. Has a rule for vmap, since a loss may be taken sample by sample."""

    @staticmethod
    def forward(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
        rows, classes = logits.shape
        losses = torch.empty(rows, device=logits.device)
        levels = torch.empty_like(losses)
        block, warps = _block(classes)
        entropy_forward[(rows,)](
            logits, targets, losses, levels, logits.stride(0), classes, ignored, BLOCK=block, num_warps=warps
        )
        return losses, levels

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        logits, targets, ctx.ignored = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, targets, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
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

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], logits: Tensor, targets: Tensor, ignored: int
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        logits, targets = (
            part.expand(info.batch_size, *part.shape) if dim is None else part.movedim(dim, 0)
            for part, dim in zip((logits, targets), in_dims, strict=False)
        )
        losses, levels = _apply(logits.flatten(0, 1), targets.flatten(), ignored)
        return (losses.view(targets.shape), levels.view(targets.shape)), (0, 0)


def _apply(logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    return _RowsCrossEntropy.apply(logits, targets.contiguous(), ignored)


def rows_cross_entropy(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The loss of each row of logits `[R, V]`, float32 `[R]`; 0 where the target is `ignored`."""
    return _apply(logits, targets, ignored)[0]


def _block(classes: int) -> tuple[int, int]:
    """The columns that a program holds at once, and its warps."""
    block = min(1 << (classes - 1).bit_length(), 4096)
    return block, max(block // 512, 1)
