# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for the cross-entropy of rows of logits, which are read once forward and once backward."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entropy_forward(logits, targets, losses, levels, stride, classes, ignored, BLOCK: tl.constexpr):
    """log Σ exp of a row, and its difference from the target's logit; 0 for an ignored target, NaN for an impossible
    one."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    highest, total = -3.0e38, 0.0  # finite, so that logits of −∞ count as 0
    for first in range(0, classes, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < classes, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(value, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(value - higher), axis=0)
        highest = higher
    level = highest + tl.log(total)
    target = tl.load(targets + row)
    possible = (target >= 0) & (target < classes)
    chosen = tl.load(logits + target, mask=possible, other=float("nan")).to(tl.float32)
    tl.store(levels + row, level)
    tl.store(losses + row, tl.where(target == ignored, 0.0, level - chosen))


@triton.jit
def entropy_backward(
    logits, targets, levels, slopes, dlogits, stride, new_stride, classes, ignored, BLOCK: tl.constexpr
):
    """(softmax − one-hot) times the row's slope; 0 for an ignored target."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    slope = tl.where(target != ignored, tl.load(slopes + row), 0.0)
    level = tl.load(levels + row)
    for first in range(0, classes, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + column, mask=column < classes, other=0.0).to(tl.float32)
        gradient = (tl.exp(value - level) - tl.where(column == target, 1.0, 0.0)) * slope
        tl.store(dlogits + row * new_stride + column, gradient.to(dlogits.dtype.element_ty), mask=column < classes)
