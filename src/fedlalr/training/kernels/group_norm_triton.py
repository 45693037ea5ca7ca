# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for GELU followed by GroupNorm, forward and backward.

Maps are `[C, D, B, H, W]`. Statistics cover one image in one group of channels, which a program holds completely, as a
tile `[CHANNELS, PIXELS]`, so one pass is enough. Forward, `pieces` programs share the images of a group; backward, one
program owns them all and sums the gradients of the group's channels over the images in order. Maps are bfloat16,
arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedlalr.training.kernels.gelu_triton import gelu, gelu_and_slope


@triton.jit
def load_channels(parameter, stride, client, group, CHANNELS: tl.constexpr):
    """A group's part of a parameter, `[CHANNELS, 1]`."""
    return tl.load(parameter + client * stride + group * CHANNELS + tl.arange(0, CHANNELS))[:, None]


@triton.jit
def tile_places(images, CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """The offsets of the pixels of a group's first image; its channels are one row of images apart."""
    return tl.arange(0, CHANNELS)[:, None] * (images * PIXELS) + tl.arange(0, PIXELS)[None, :]


@triton.jit
def group_forward(
    y, x, bias, gamma, beta, out, mean_out, rstd_out,
    bias_stride, gamma_stride, beta_stride, groups, images, pieces, eps,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BIASED: tl.constexpr, RESIDUAL: tl.constexpr, POOLED: tl.constexpr,
    PIECE: tl.constexpr,
):  # fmt: skip
    """out = GN(gelu(y + bias)) for a piece of a group's images, plus x if RESIDUAL, or its mean over the pixels.

    Unless BIASED, y already includes its bias.
    """
    row, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    client, group = (row // groups).to(tl.int64), row % groups
    b = 0.0
    if BIASED:
        b = load_channels(bias, bias_stride, client, group, CHANNELS)
    scale = load_channels(gamma, gamma_stride, client, group, CHANNELS)
    shift = load_channels(beta, beta_stride, client, group, CHANNELS)
    places = tile_places(images, CHANNELS, PIXELS)
    first = row.to(tl.int64) * (images * CHANNELS)
    y += first * PIXELS
    out += first if POOLED else first * PIXELS
    if RESIDUAL:
        x += first * PIXELS
    mean_out += row.to(tl.int64) * images
    rstd_out += row.to(tl.int64) * images
    begin = piece * PIECE
    for image in range(begin, tl.minimum(begin + PIECE, images)):
        g = gelu(tl.load(y + places + image * PIXELS).to(tl.float32) + b)
        mean = tl.sum(g) * (1.0 / (CHANNELS * PIXELS))
        centred = g - mean
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred) * (1.0 / (CHANNELS * PIXELS)) + eps)
        tl.store(mean_out + image, mean)
        tl.store(rstd_out + image, rstd)
        z = centred * rstd * scale + shift
        if RESIDUAL:
            z += tl.load(x + places + image * PIXELS).to(tl.float32)
        if POOLED:
            tl.store(out + tl.arange(0, CHANNELS) * images + image, tl.sum(z, axis=1) * (1.0 / PIXELS))
        else:
            tl.store(out + places + image * PIXELS, z.to(tl.bfloat16))


@triton.jit
def group_backward(
    y, dout, bias, gamma, mean_in, rstd_in, dy, dbias, dgamma, dbeta,
    bias_stride, gamma_stride, groups, images,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, BIASED: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Gradients of `group_forward` with respect to y, bias, gamma and beta; that of x is `dout` itself."""
    row = tl.program_id(0)
    client, group = (row // groups).to(tl.int64), row % groups
    b = 0.0
    if BIASED:
        b = load_channels(bias, bias_stride, client, group, CHANNELS)
    scale = load_channels(gamma, gamma_stride, client, group, CHANNELS)
    places = tile_places(images, CHANNELS, PIXELS)
    first = row.to(tl.int64) * (images * CHANNELS)
    y += first * PIXELS
    dy += first * PIXELS
    dout += first if POOLED else first * PIXELS
    mean_in += row.to(tl.int64) * images
    rstd_in += row.to(tl.int64) * images
    sum_dx = tl.zeros([CHANNELS, PIXELS], tl.float32)
    sum_dxn = tl.zeros([CHANNELS, PIXELS], tl.float32)
    sum_dy = tl.zeros([CHANNELS, PIXELS], tl.float32)
    for image in range(0, images):
        if POOLED:
            share = tl.load(dout + tl.arange(0, CHANNELS) * images + image) * (1.0 / PIXELS)
            dx = share[:, None] + tl.zeros([1, PIXELS], tl.float32)
        else:
            dx = tl.load(dout + places + image * PIXELS).to(tl.float32)
        g, slope = gelu_and_slope(tl.load(y + places + image * PIXELS).to(tl.float32) + b)
        rstd = tl.load(rstd_in + image)
        normed = (g - tl.load(mean_in + image)) * rstd
        sum_dx += dx
        sum_dxn += dx * normed
        # dg = (γ dx − mean(γ dx) − ĝ mean(γ dx ĝ)) / σ
        dn = dx * scale
        level = tl.sum(dn) * (1.0 / (CHANNELS * PIXELS))
        along = tl.sum(dn * normed) * (1.0 / (CHANNELS * PIXELS))
        gradient = slope * rstd * (dn - level - normed * along)
        tl.store(dy + places + image * PIXELS, gradient.to(tl.bfloat16))
        sum_dy += gradient
    channel = row * CHANNELS + tl.arange(0, CHANNELS)
    tl.store(dbias + channel, tl.sum(sum_dy, axis=1))
    tl.store(dgamma + channel, tl.sum(sum_dxn, axis=1))
    tl.store(dbeta + channel, tl.sum(sum_dx, axis=1))
