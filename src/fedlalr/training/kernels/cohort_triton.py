# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""What the server computes from a cohort's replies `[R, P]`, each in one pass."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def measure_changes(
    values, reference, squares, fell, row_stride, size, blocks, SPAN: tl.constexpr, BLOCK: tl.constexpr
):
    """For SPAN elements of one reply: the sum of squared changes in double precision, and how many fell."""
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * SPAN
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    below = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, SPAN, BLOCK):
        place = begin + first + tl.arange(0, BLOCK)
        real = place < size
        value = tl.load(values + row * row_stride + place, mask=real, other=0.0)
        broadcast = tl.load(reference + place, mask=real, other=0.0)
        change = (value - broadcast).to(tl.float64)
        total += change * change
        below += (value < broadcast).to(tl.int32)
    at = row * blocks + tl.program_id(0)
    tl.store(squares + at, tl.sum(total, axis=0))
    tl.store(fell + at, tl.sum(below, axis=0))


@triton.jit
def weighted_change(values, reference, share, out, row_stride, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """b + Σ wᵢ (uᵢ − b) for some coordinates, with the replies in order."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    broadcast = tl.load(reference + place, mask=real, other=0.0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(0, ROWS):
        at = tl.full((), row, tl.int64) * row_stride
        value = tl.load(values + at + place, mask=real, other=0.0)
        total += tl.load(share + row) * (value - broadcast)
    tl.store(out + place, broadcast + total, mask=real)
