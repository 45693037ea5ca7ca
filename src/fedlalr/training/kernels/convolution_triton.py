# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"
"""Convolutions of a stack of clients as matrix products that gather their patches on the fly.

Images are `[C, B, height, width, channels]`, kernels `[C, rows, columns, channels, features]`: in both the last
dimension of a patch is contiguous. An output place is a row of the product, a kernel weight a column.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def patches(
    x, place, weight, places, height, width, rows, columns,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    TRANSPOSED: tl.constexpr, STRIDED: tl.constexpr, PADDED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The inputs under the kernel's weights at some output places, `[places, weights]`; zero outside the image.

    TRANSPOSED: the reverse, from places of a convolution's input to the outputs they contributed to. An address is a
    place's plus a weight's, except in a transposed convolution that is STRIDED; each pair is checked only if the kernel
    may reach beyond the image (PADDED). WHOLE: all weights exist.
    """
    channel = weight % CHANNELS
    tap = weight // CHANNELS
    down = (tap // KERNEL_W) * dilation_h
    right = (tap % KERNEL_W) * dilation_w
    image = place // (rows * columns)
    row = (place // columns) % rows
    column = place % columns
    there = (place < places)[:, None]
    if not WHOLE:
        there = there & (weight < KERNEL_H * KERNEL_W * CHANNELS)[None, :]
    if TRANSPOSED and STRIDED:
        above = (row + pad_h)[:, None] - down[None, :]
        left = (column + pad_w)[:, None] - right[None, :]
        y = above // stride_h
        z = left // stride_w
        there = there & (above >= 0) & (left >= 0) & (y * stride_h == above) & (z * stride_w == left)
        there = there & (y < height) & (z < width)
        at = (image * height * width)[:, None] * CHANNELS + (y * width + z) * CHANNELS + channel[None, :]
    else:
        if TRANSPOSED:
            top = row + pad_h
            side = column + pad_w
            down = -down
            right = -right
        else:
            top = row * stride_h - pad_h
            side = column * stride_w - pad_w
        if PADDED:
            y = top[:, None] + down[None, :]
            z = side[:, None] + right[None, :]
            there = there & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        first = ((image * height + top) * width + side) * CHANNELS
        at = first[:, None] + ((down * width + right) * CHANNELS + channel)[None, :]
    return tl.load(x + at, mask=there, other=0.0)


@triton.jit
def convolve(
    x, kernels, bias, out, bias_stride, images, height, width, rows, columns, features,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    TRANSPOSED: tl.constexpr, STRIDED: tl.constexpr, PADDED: tl.constexpr,
    BIASED: tl.constexpr, PRECISION: tl.constexpr,
    PLACES: tl.constexpr, FEATURES: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Some places and features of one client's convolution, or (TRANSPOSED) of the gradient of its images."""
    client = tl.program_id(2).to(tl.int64)
    places = images * rows * columns
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    x += client * images * height * width * CHANNELS
    kernels += client * KERNEL_H * KERNEL_W * CHANNELS * features
    total = tl.zeros((PLACES, FEATURES), dtype=tl.float32)
    for first in range(0, KERNEL_H * KERNEL_W * CHANNELS, WEIGHTS):
        weight = first + tl.arange(0, WEIGHTS)
        seen = patches(
            x, place, weight, places, height, width, rows, columns,
            stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, CHANNELS, KERNEL_H, KERNEL_W,
            TRANSPOSED, STRIDED, PADDED, KERNEL_H * KERNEL_W * CHANNELS % WEIGHTS == 0,
        )  # fmt: skip
        real = (weight < KERNEL_H * KERNEL_W * CHANNELS)[:, None] & (feature < features)[None, :]
        taps = tl.load(kernels + weight[:, None] * features + feature[None, :], mask=real, other=0.0)
        total = tl.dot(seen, taps, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + client * bias_stride + feature, mask=feature < features, other=0.0)[None, :]
    out += client * places * features
    real = (place < places)[:, None] & (feature < features)[None, :]
    tl.store(out + place[:, None] * features + feature[None, :], total.to(out.dtype.element_ty), mask=real)


@triton.jit
def weight_gradient(
    x, slope, out, clients, images, height, width, rows, columns, features,
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    CHANNELS: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
    SHARE: tl.constexpr, PLACES: tl.constexpr, FEATURES: tl.constexpr, WEIGHTS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Some weights and features of the gradient of one client's kernels, summed over SHARE of its places.

    A program computes `PRODUCTS` products of `WEIGHTS` weights with the same slopes. `out` is
    `[parts, C, weights, features]`; the caller sums the parts, always in the same order.
    """
    which = tl.program_id(2)
    part = which // clients
    client = (which % clients).to(tl.int64)
    places = images * rows * columns
    first_weight = tl.program_id(0) * (PRODUCTS * WEIGHTS) + tl.arange(0, WEIGHTS)
    feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    x += client * images * height * width * CHANNELS
    slope += client * places * features
    totals = ()
    for _ in tl.static_range(PRODUCTS):
        totals += (tl.zeros((WEIGHTS, FEATURES), dtype=tl.float32),)
    for first in range(0, SHARE, PLACES):
        place = part * SHARE + first + tl.arange(0, PLACES)
        real = (place < places)[:, None] & (feature < features)[None, :]
        slopes = tl.load(slope + place[:, None] * features + feature[None, :], mask=real, other=0.0)
        sums = ()
        for product in tl.static_range(PRODUCTS):
            seen = patches(
                x, place, first_weight + product * WEIGHTS, places, height, width, rows, columns,
                stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, CHANNELS, KERNEL_H, KERNEL_W,
                False, False, PADDED, KERNEL_H * KERNEL_W * CHANNELS % (PRODUCTS * WEIGHTS) == 0,
            )  # fmt: skip
            sums += (tl.dot(tl.trans(seen), slopes, totals[product], input_precision=PRECISION),)
        totals = sums
    size = KERNEL_H * KERNEL_W * CHANNELS
    out += which.to(tl.int64) * size * features
    for product in tl.static_range(PRODUCTS):
        weight = first_weight + product * WEIGHTS
        real = (weight < size)[:, None] & (feature < features)[None, :]
        tl.store(out + weight[:, None] * features + feature[None, :], totals[product], mask=real)


@triton.jit
def pooled_places(
    size, height, width, rows, columns, channels,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some outputs of a pooling over whole windows: their places, whether they exist, and where their windows begin."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    channel = place % channels
    column = place // channels % columns
    row = place // (channels * columns) % rows
    image = place // (channels * columns * rows)
    first = ((image * height + row * KERNEL_H) * width + column * KERNEL_W) * channels + channel
    return place, place < size, first


@triton.jit
def max_pool(
    x, out, which, size, height, width, rows, columns, channels,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest input of each window, and which one it is: the first of equals, and the last that is no number."""
    place, real, first = pooled_places(size, height, width, rows, columns, channels, KERNEL_H, KERNEL_W, BLOCK)
    best = tl.load(x + first, mask=real, other=0.0)
    best_at = tl.zeros((BLOCK,), tl.uint8)
    for tap in tl.static_range(1, KERNEL_H * KERNEL_W):
        value = tl.load(x + first + ((tap // KERNEL_W) * width + tap % KERNEL_W) * channels, mask=real, other=0.0)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        best_at = tl.where(better, tap, best_at).to(tl.uint8)
    tl.store(out + place, best, mask=real)
    tl.store(which + place, best_at, mask=real)


@triton.jit
def max_pool_backward(
    slope, which, out, size, height, width, rows, columns, channels,
    KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of the inputs of each window: the output's at the largest, zero elsewhere."""
    place, real, first = pooled_places(size, height, width, rows, columns, channels, KERNEL_H, KERNEL_W, BLOCK)
    value = tl.load(slope + place, mask=real, other=0.0)
    at = tl.load(which + place, mask=real, other=0)
    for tap in tl.static_range(KERNEL_H * KERNEL_W):
        share = tl.where(at == tap, value, 0.0)
        tl.store(out + first + ((tap // KERNEL_W) * width + tap % KERNEL_W) * channels, share, mask=real)
