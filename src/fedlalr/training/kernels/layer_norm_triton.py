# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for LayerNorm and RMSNorm of a stack of clients, forward and backward.

Rows are `[C, N, D]`. A program works on tiles of ROWS rows of one client; D is padded to BLOCK. Arithmetic is float32.
Backward, a program takes SPAN rows and writes their share of the gradients of γ and β, which the caller adds up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x, gamma, beta, out, mean_out, rstd_out, gamma_stride, beta_stride, rows, width, eps,
    CENTRED: tl.constexpr, SCALED: tl.constexpr, SHIFTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (x − mean) / deviation · γ + β, or without the mean unless CENTRED."""
    client = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < width
    keep = (row < rows)[:, None] & inside[None, :]
    place = (client * rows + row)[:, None] * width + column[None, :]
    value = tl.load(x + place, mask=keep, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(value, axis=1) / width
        value = tl.where(keep, value - mean[:, None], 0.0)
        tl.store(mean_out + client * rows + row, mean, mask=row < rows)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / width + eps)
    tl.store(rstd_out + client * rows + row, rstd, mask=row < rows)
    value *= rstd[:, None]
    if SCALED:
        value *= tl.load(gamma + client * gamma_stride + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SHIFTED:
        value += tl.load(beta + client * beta_stride + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, value.to(out.dtype.element_ty), mask=keep)


@triton.jit
def norm_backward(
    x, dout, gamma, mean_in, rstd_in, dx, dgamma, dbeta, gamma_stride, rows, width,
    CENTRED: tl.constexpr, SCALED: tl.constexpr, SUMMED: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """dx, and if SUMMED the sums of dout · x̂ and of dout over this program's rows."""
    client = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = 1.0
    if SCALED:
        scale = tl.load(gamma + client * gamma_stride + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if SUMMED:
        along_sum = tl.zeros([ROWS, BLOCK], tl.float32)
        level_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, SPAN, ROWS):
        row = tl.program_id(0) * SPAN + first + tl.arange(0, ROWS)
        keep = (row < rows)[:, None] & inside[None, :]
        place = (client * rows + row)[:, None] * width + column[None, :]
        slope = tl.load(dout + place, mask=keep, other=0.0).to(tl.float32)
        normed = tl.load(x + place, mask=keep, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_in + client * rows + row, mask=row < rows, other=0.0)
        if CENTRED:
            normed -= tl.load(mean_in + client * rows + row, mask=row < rows, other=0.0)[:, None]
        normed = tl.where(keep, normed * rstd[:, None], 0.0)
        if SUMMED:
            along_sum += slope * normed
            level_sum += slope
        # dx = (γ dy − mean(γ dy) − x̂ mean(γ dy x̂)) / σ
        slope *= scale
        gradient = slope - normed * (tl.sum(slope * normed, axis=1) / width)[:, None]
        if CENTRED:
            gradient -= (tl.sum(slope, axis=1) / width)[:, None]
        tl.store(dx + place, (gradient * rstd[:, None]).to(dx.dtype.element_ty), mask=keep)
    if SUMMED:
        part = (client * tl.num_programs(0) + tl.program_id(0)) * width + column
        tl.store(dgamma + part, tl.sum(along_sum, axis=0), mask=inside)
        tl.store(dbeta + part, tl.sum(level_sum, axis=0), mask=inside)
