# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for out = x + BN(gelu(depthwise(x) + bias)), for the convolution alone, and for both gradients.

One program owns one channel of one client, a contiguous row of B images, as in `norm_triton`. The convolution runs on
the tensor cores: a block of R output rows of an image is the same linear function of the eight input rows around it
everywhere, so a whole batch of blocks is one product with a banded Toeplitz matrix `[8 W, R W]`, which is built from
the taps once per row. Its mirror image gives the input gradient. The product of the windows of one side with the blocks
of the other, summed along the bands, gives the gradient of the taps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedlalr.training.kernels.gelu_triton import gelu
from fedlalr.training.kernels.norm_triton import (
    AGAIN,
    NO_MORE,
    finish_statistics,
    load_kept,
    load_tile,
    row_count,
    row_gradient,
    store_tile,
)


@triton.jit
def toeplitz(table, WIDTH: tl.constexpr, ROWS: tl.constexpr, MIRRORED: tl.constexpr):
    """The matrix that maps the eight rows of a window to the `ROWS` rows of its block.

    `table` holds the taps surrounded by zeros, `[11, 2 W]`, with the middle tap at (5, W), see `tap_table`. So no shift
    needs a bounds check.
    """
    k = tl.arange(0, 8 * WIDTH)[:, None]
    n = tl.arange(0, ROWS * WIDTH)[None, :]
    place = (k // WIDTH - 2) * (2 * WIDTH) + k % WIDTH - (n // WIDTH * (2 * WIDTH) + n % WIDTH)
    if MIRRORED:
        place = -place
    return tl.load(table + 5 * (2 * WIDTH) + WIDTH + place)


@triton.jit
def load_windows(row_start, window, windows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The eight rows around each block, zero outside its image: `[len(window), 8 W]`. An image has `BLOCKS` blocks."""
    k = tl.arange(0, 8 * WIDTH)[None, :]
    image_row = (window % BLOCKS)[:, None] * ROWS - 2 + k // WIDTH
    inside = (image_row >= 0) & (image_row < ROWS * BLOCKS) & (window < windows)[:, None]
    return tl.load(row_start + window[:, None] * (ROWS * WIDTH) - 2 * WIDTH + k, mask=inside, other=0.0)


@triton.jit
def tile_residual(x, y, scale, shift, out, image, images, PIXELS: tl.constexpr, BOUNDED: tl.constexpr):
    """Write x + scale · gelu(y) + shift for some images."""
    z = gelu(load_tile(y, image, images, PIXELS, BOUNDED, NO_MORE)) * scale + shift
    z += load_tile(x, image, images, PIXELS, BOUNDED, NO_MORE)
    store_tile(out, image, images, z, PIXELS, BOUNDED, NO_MORE)


@triton.jit
def depthwise_forward(
    x, table, bias, gamma, beta, running_mean, running_var, mask, y, out, mean_out, rstd_out, new_mean, new_var,
    bias_stride, gamma_stride, beta_stride, channels, images, momentum, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr,
    WINDOWS: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = depthwise(x) + bias and out = x + BN(gelu(y))."""
    PIXELS: tl.constexpr = BLOCKS * ROWS * WIDTH
    row = tl.program_id(0)
    client, channel = (row // channels).to(tl.int64), row % channels
    b = tl.load(bias + client * bias_stride + channel)
    scale = tl.load(gamma + client * gamma_stride + channel)
    shift = tl.load(beta + client * beta_stride + channel)
    matrix = toeplitz(table + row * (22 * WIDTH), WIDTH, ROWS, False)
    first = row.to(tl.int64) * images * PIXELS
    x += first
    y += first
    out += first
    if MASKED:
        mask += client * images
    count = row_count(mask, images, PIXELS, MASKED)

    windows = images * BLOCKS
    sums = tl.zeros([WINDOWS], tl.float32)
    squares = tl.zeros([WINDOWS], tl.float32)
    for start in range(0, windows, WINDOWS):
        window = start + tl.arange(0, WINDOWS)
        conv = tl.dot(load_windows(x, window, windows, WIDTH, ROWS, BLOCKS), matrix) + b
        store_tile(y, window, windows, conv, ROWS * WIDTH, True)
        g = gelu(conv)
        if MASKED:
            weighted = g * load_kept(mask, window // BLOCKS, images)
        else:
            weighted = tl.where((window < windows)[:, None], g, 0.0)
        sums += tl.sum(weighted, axis=1)
        squares += tl.sum(weighted * g, axis=1)
    total, total_squares = tl.sum(sums), tl.sum(squares)

    mean, rstd = finish_statistics(
        total, total_squares, count, row,
        running_mean, running_var, new_mean, new_var, mean_out, rstd_out, momentum, eps,
    )  # fmt: skip
    scale *= rstd
    shift -= mean * scale
    tl.debug_barrier()  # the second pass reads what other threads of this program have written
    whole = images // TILE * TILE
    for start in range(whole, images, TAIL):
        rest = start + tl.arange(0, TAIL)
        tile_residual(x, y, scale, shift, out, rest, images, PIXELS, True)
    for done in tl.range(0, whole, TILE, num_stages=STAGES):
        image = whole - TILE - done + tl.arange(0, TILE)
        tile_residual(x, y, scale, shift, out, image, images, PIXELS, False)


@triton.jit
def depthwise_alone(
    x, table, bias, y, bias_stride, channels, images, pieces,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WINDOWS: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """y = depthwise(x) + bias. `pieces` programs share a row; each computes `PRODUCTS` products."""
    row, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    client, channel = (row // channels).to(tl.int64), row % channels
    b = tl.load(bias + client * bias_stride + channel)
    matrix = toeplitz(table + row * (22 * WIDTH), WIDTH, ROWS, False)
    windows = images * BLOCKS
    first = row.to(tl.int64) * windows * (ROWS * WIDTH)
    begin = piece * (PRODUCTS * WINDOWS)
    for start in range(begin, tl.minimum(begin + PRODUCTS * WINDOWS, windows), WINDOWS):
        window = start + tl.arange(0, WINDOWS)
        conv = tl.dot(load_windows(x + first, window, windows, WIDTH, ROWS, BLOCKS), matrix) + b
        store_tile(y + first, window, windows, conv, ROWS * WIDTH, True)


@triton.jit
def convolution_gradients(
    x, dy, dout, table, dx, dtaps, scratch, images,
    KERNEL: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    WINDOWS: tl.constexpr,
):  # fmt: skip
    """Write dx of a row (dout + the convolution's input gradient) and the gradient of its taps; pointers at the row.

    `dy`, the gradient of the convolution's output, may share dx's memory: a product takes whole images.
    """
    tl.static_assert(WINDOWS % BLOCKS == 0)
    matrix = toeplitz(table, WIDTH, ROWS, True)
    windows = images * BLOCKS
    products = tl.zeros([8 * WIDTH, ROWS * WIDTH], tl.float32)
    for start in range(0, windows, WINDOWS):
        window = start + tl.arange(0, WINDOWS)
        around = load_windows(dy, window, windows, WIDTH, ROWS, BLOCKS)
        here = load_tile(x, window, windows, ROWS * WIDTH, True, NO_MORE).to(tl.bfloat16)
        residual = load_tile(dout, window, windows, ROWS * WIDTH, True, NO_MORE)
        tl.debug_barrier()  # all threads have read their part of these images' dy
        store_tile(dx, window, windows, tl.dot(around, matrix) + residual, ROWS * WIDTH, True, NO_MORE)
        products = tl.dot(tl.trans(around), here, products)
    store_taps(products, scratch, dtaps, KERNEL, WIDTH, ROWS, TAPS)


@triton.jit
def depthwise_backward(
    x, dy, dout, table, dx, dtaps, scratch, images,
    KERNEL: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    WINDOWS: tl.constexpr,
):  # fmt: skip
    """Gradients of `depthwise_alone` from dy: of x, plus the residual's `dout`, and of the taps."""
    row = tl.program_id(0)
    first = row.to(tl.int64) * images * (BLOCKS * ROWS * WIDTH)
    convolution_gradients(
        x + first, dy + first, dout + first, table + row * (22 * WIDTH), dx + first, dtaps + row * (KERNEL * KERNEL),
        scratch + row.to(tl.int64) * (8 * ROWS * WIDTH * WIDTH), images, KERNEL, TAPS, WIDTH, ROWS, BLOCKS, WINDOWS,
    )  # fmt: skip


@triton.jit
def depthwise_norm_backward(
    x, y, dout, table, gamma, mask, mean_in, rstd_in, dx, dtaps, dbias, dgamma, dbeta, scratch,
    gamma_stride, channels, images,
    KERNEL: tl.constexpr, TAPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    MASKED: tl.constexpr, WINDOWS: tl.constexpr, TILE: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of `depthwise_forward` with respect to x, the taps, bias, gamma and beta.

    The gradient of y is stored temporarily in dx's memory, and overwritten before it leaves the cache.
    """
    PIXELS: tl.constexpr = BLOCKS * ROWS * WIDTH
    row = tl.program_id(0)
    client, channel = (row // channels).to(tl.int64), row % channels
    scale = tl.load(gamma + client * gamma_stride + channel)
    first = row.to(tl.int64) * images * PIXELS
    dout += first
    dx += first
    if MASKED:
        mask += client * images
    bias_gradient, gamma_gradient, beta_gradient = row_gradient(
        y + first, 0.0, dout, scale, tl.load(mean_in + row), tl.load(rstd_in + row), mask, dx,
        images, PIXELS, MASKED, False, TILE, TAIL, STAGES, AGAIN,
    )  # fmt: skip
    tl.store(dbias + row, bias_gradient)
    tl.store(dgamma + row, gamma_gradient)
    tl.store(dbeta + row, beta_gradient)
    tl.debug_barrier()  # windows read what other threads of this program have written
    convolution_gradients(
        x + first, dx, dout, table + row * (22 * WIDTH), dx, dtaps + row * (KERNEL * KERNEL),
        scratch + row.to(tl.int64) * (8 * ROWS * WIDTH * WIDTH), images, KERNEL, TAPS, WIDTH, ROWS, BLOCKS, WINDOWS,
    )  # fmt: skip


@triton.jit
def store_taps(
    products, scratch, dtaps, KERNEL: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, TAPS: tl.constexpr
):
    """Sum products of windows of dy with blocks of x, `[8 W, R W]`, along their bands, one for each tap.

    A band crosses all threads. Storing the products around the bands, in whole sectors of eight, and loading the bands
    again is far cheaper than reductions between warps, which suffer from shared-memory bank conflicts.
    """
    HALF: tl.constexpr = KERNEL // 2
    k = tl.arange(0, 8 * WIDTH)[:, None]
    n = tl.arange(0, ROWS * WIDTH)[None, :]
    above, left = k // WIDTH - 2 - n // WIDTH, k % WIDTH - n // 8 % (WIDTH // 8) * 8
    near = (above >= -HALF) & (above <= HALF) & (left >= -HALF) & (left <= 7 + HALF)
    tl.store(scratch + k * (ROWS * WIDTH) + n, products, mask=near)
    tl.debug_barrier()
    tap = tl.arange(0, TAPS)[:, None]
    down = n // WIDTH + 2 + HALF - tap // KERNEL
    across = n % WIDTH + HALF - tap % KERNEL
    inside = (across >= 0) & (across < WIDTH) & (tap < KERNEL * KERNEL)
    band = tl.load(scratch + (down * WIDTH + across) * (ROWS * WIDTH) + n, mask=inside, other=0.0)
    place = tl.arange(0, TAPS)
    tl.store(dtaps + place, tl.sum(band, axis=1), mask=place < KERNEL * KERNEL)
