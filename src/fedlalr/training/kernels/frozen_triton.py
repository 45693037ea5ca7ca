# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for layers with BatchNorm in evaluation mode.

With running statistics BatchNorm is a scale and a shift, so one pass from a layer's input to its output is enough, and
a row of images needs no single owner as in `norm_triton`: `pieces` programs share it. There is no backward pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedlalr.training.kernels.depthwise_triton import load_windows, toeplitz
from fedlalr.training.kernels.gelu_triton import gelu
from fedlalr.training.kernels.norm_triton import load_tile, store_tile, tile_output


@triton.jit
def frozen_scale(gamma, beta, running_mean, running_var, row, client, channel, gamma_stride, beta_stride, eps):
    """The scale and shift of BatchNorm with running statistics."""
    scale = tl.load(gamma + client * gamma_stride + channel) / tl.sqrt(tl.load(running_var + row) + eps)
    shift = tl.load(beta + client * beta_stride + channel) - tl.load(running_mean + row) * scale
    return scale, shift


@triton.jit
def frozen_norm(
    y, bias, gamma, beta, running_mean, running_var, out,
    bias_stride, gamma_stride, beta_stride, channels, images, pieces, eps,
    PIXELS: tl.constexpr, POOLED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """out = BN(gelu(y + bias)) for one tile of images, or its mean over the pixels."""
    row, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    client, channel = (row // channels).to(tl.int64), row % channels
    b = tl.load(bias + client * bias_stride + channel)
    scale, shift = frozen_scale(
        gamma, beta, running_mean, running_var, row, client, channel, gamma_stride, beta_stride, eps
    )
    first = row.to(tl.int64) * images
    y += first * PIXELS
    out += first if POOLED else first * PIXELS
    image = piece * TILE + tl.arange(0, TILE)
    tile_output(y, b, scale, shift, out, image, images, PIXELS, POOLED, True)


@triton.jit
def frozen_depthwise(
    x, table, bias, gamma, beta, running_mean, running_var, out,
    bias_stride, gamma_stride, beta_stride, channels, images, pieces, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WINDOWS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """out = x + BN(gelu(depthwise(x) + bias)) for as many blocks as `PRODUCTS` products cover."""
    row, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    client, channel = (row // channels).to(tl.int64), row % channels
    b = tl.load(bias + client * bias_stride + channel)
    scale, shift = frozen_scale(
        gamma, beta, running_mean, running_var, row, client, channel, gamma_stride, beta_stride, eps
    )
    matrix = toeplitz(table + row * (22 * WIDTH), WIDTH, ROWS, False)
    windows = images * BLOCKS
    first = row.to(tl.int64) * windows * (ROWS * WIDTH)
    x += first
    out += first
    begin = piece * (PRODUCTS * WINDOWS)
    for start in range(begin, tl.minimum(begin + PRODUCTS * WINDOWS, windows), WINDOWS):
        window = start + tl.arange(0, WINDOWS)
        conv = tl.dot(load_windows(x, window, windows, WIDTH, ROWS, BLOCKS), matrix) + b
        z = gelu(conv) * scale + shift + load_tile(x, window, windows, ROWS * WIDTH, True)
        store_tile(out, window, windows, z, ROWS * WIDTH, True)
