# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,assignment"
"""Triton kernels for GELU followed by BatchNorm, forward and backward.

Maps are `[C, D, B, H, W]`: everything that one BatchNorm channel of one client averages over is one contiguous row, so
one program owns it, no sum crosses programs and the result does not depend on their order. A program makes two passes
over its row, one to compute the sums and one to use them, in tiles of `TILE` whole images. Forward, the GELUs of `HELD`
tiles stay in registers in between. Backward there are too many values for that: the second pass runs in reverse, from
what is still in the cache, with `STAGES` tiles being loaded at once. Whole tiles need no bounds checks there; the
remainder is processed `TAIL` images at a time. Maps are bfloat16, arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fedlalr.training.kernels.gelu_triton import gelu, gelu_and_slope

AGAIN = tl.constexpr("evict_last")
"""Cache hint: will be read again soon."""
NO_MORE = tl.constexpr("evict_first")
"""Cache hint: will not be read again."""
NO_HINT = tl.constexpr("")


@triton.jit
def row_count(mask, images, PIXELS: tl.constexpr, MASKED: tl.constexpr):
    """The number of values in a client's statistics, at least 1; `mask` points to the client's row."""
    if MASKED:
        kept = tl.zeros([64], tl.float32)
        for start in range(0, images, 64):
            image = start + tl.arange(0, 64)
            kept += tl.load(mask + image, mask=image < images, other=0.0)
        count = tl.maximum(tl.sum(kept) * PIXELS, 1.0)
    else:
        count = images * PIXELS * 1.0
    return count


@triton.jit
def finish_statistics(
    total, squares, count, row, running_mean, running_var, new_mean, new_var, mean_out, rstd_out, momentum, eps
):
    """Mean and 1/σ of a row from its sums; also stores them and the new running statistics."""
    mean = total / count
    variance = tl.maximum(squares / count - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(variance + eps)
    unbiased = variance * count / tl.maximum(count - 1, 1.0)
    tl.store(new_mean + row, (1 - momentum) * tl.load(running_mean + row) + momentum * mean)
    tl.store(new_var + row, (1 - momentum) * tl.load(running_var + row) + momentum * unbiased)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)
    return mean, rstd


@triton.jit
def load_tile(row_start, image, images, PIXELS: tl.constexpr, BOUNDED: tl.constexpr, HINT: tl.constexpr = NO_HINT):
    """Some images of a row in float32, `[len(image), PIXELS]`; zero beyond the last image."""
    place = image[:, None] * PIXELS + tl.arange(0, PIXELS)[None, :]
    if BOUNDED:
        tile = tl.load(row_start + place, mask=(image < images)[:, None], other=0.0, eviction_policy=HINT)
    else:
        tile = tl.load(row_start + place, eviction_policy=HINT)
    return tile.to(tl.float32)


@triton.jit
def store_tile(
    row_start, image, images, tile, PIXELS: tl.constexpr, BOUNDED: tl.constexpr, HINT: tl.constexpr = NO_HINT
):
    """Write some images of a row, rounded."""
    place = image[:, None] * PIXELS + tl.arange(0, PIXELS)[None, :]
    if BOUNDED:
        tl.store(row_start + place, tile.to(tl.bfloat16), mask=(image < images)[:, None], eviction_policy=HINT)
    else:
        tl.store(row_start + place, tile.to(tl.bfloat16), eviction_policy=HINT)


@triton.jit
def load_kept(mask, image, images):
    """1 for images that count, 0 for padding: `[len(image), 1]`."""
    return tl.load(mask + image, mask=image < images, other=0.0)[:, None]


@triton.jit
def hold(row_start, images, PIXELS: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr):
    """The first `HELD` tiles of a row in their stored precision; only the last may extend beyond the row."""
    tiles = ()
    for tile in tl.static_range(HELD):
        image = tile * TILE + tl.arange(0, TILE)
        place = image[:, None] * PIXELS + tl.arange(0, PIXELS)[None, :]
        if tile == HELD - 1:
            tiles += (tl.load(row_start + place, mask=(image < images)[:, None], other=0.0),)
        else:
            tiles += (tl.load(row_start + place),)
    return tiles


@triton.jit
def add_pairs(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit
def sum_both(a, b):
    """Σ a and Σ b of two tiles, in one reduction across threads."""
    return tl.reduce((tl.ravel(a), tl.ravel(b)), 0, add_pairs)


@triton.jit
def weigh(g, mask, image, images, MASKED: tl.constexpr, BOUNDED: tl.constexpr):
    """g for images that count, zero for others."""
    if MASKED:
        g *= load_kept(mask, image, images)
    elif BOUNDED:
        g = tl.where((image < images)[:, None], g, 0.0)
    return g


@triton.jit
def write_output(out, x, image, images, PIXELS: tl.constexpr, POOLED: tl.constexpr, BOUNDED: tl.constexpr):
    """Write some images, or their mean over the pixels."""
    if POOLED:
        tl.store(out + image, tl.sum(x, axis=1) * (1.0 / PIXELS), mask=image < images)
    else:
        store_tile(out, image, images, x, PIXELS, BOUNDED)


@triton.jit
def tile_output(
    y, b, scale, shift, out, image, images, PIXELS: tl.constexpr, POOLED: tl.constexpr, BOUNDED: tl.constexpr
):
    """Write scale · gelu(y + b) + shift for some images, or its mean over the pixels."""
    x = gelu(load_tile(y, image, images, PIXELS, BOUNDED) + b) * scale + shift
    write_output(out, x, image, images, PIXELS, POOLED, BOUNDED)


@triton.jit
def norm_forward(
    y, bias, gamma, beta, running_mean, running_var, mask, out, mean_out, rstd_out, new_mean, new_var,
    bias_stride, gamma_stride, beta_stride, channels, images, momentum, eps,
    PIXELS: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr,
    TILE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """out = BN(gelu(y + bias)), or its mean over the pixels."""
    row = tl.program_id(0)
    client, channel = (row // channels).to(tl.int64), row % channels
    b = tl.load(bias + client * bias_stride + channel)
    scale = tl.load(gamma + client * gamma_stride + channel)
    shift = tl.load(beta + client * beta_stride + channel)
    first = row.to(tl.int64) * images
    y += first * PIXELS
    out += first if POOLED else first * PIXELS
    if MASKED:
        mask += client * images
    count = row_count(mask, images, PIXELS, MASKED)

    held = hold(y, images, PIXELS, TILE, HELD)
    gelus = ()
    sums = tl.zeros([TILE, PIXELS], tl.float32)
    squares = tl.zeros([TILE, PIXELS], tl.float32)
    for tile in tl.static_range(HELD):
        g = gelu(held[tile].to(tl.float32) + b)
        gelus += (g,)
        weighted = weigh(g, mask, tile * TILE + tl.arange(0, TILE), images, MASKED, tile == HELD - 1)
        sums += weighted
        squares += weighted * g
    for start in range(HELD * TILE, images, TILE):
        image = start + tl.arange(0, TILE)
        g = gelu(load_tile(y, image, images, PIXELS, True) + b)
        weighted = weigh(g, mask, image, images, MASKED, True)
        sums += weighted
        squares += weighted * g
    total, total_squares = sum_both(sums, squares)

    mean, rstd = finish_statistics(
        total, total_squares, count, row,
        running_mean, running_var, new_mean, new_var, mean_out, rstd_out, momentum, eps,
    )  # fmt: skip
    scale *= rstd
    shift -= mean * scale
    for tile in tl.static_range(HELD):
        image = tile * TILE + tl.arange(0, TILE)
        write_output(out, gelus[tile] * scale + shift, image, images, PIXELS, POOLED, tile == HELD - 1)
    for start in range(HELD * TILE, images, TILE):
        tile_output(y, b, scale, shift, out, start + tl.arange(0, TILE), images, PIXELS, POOLED, True)


@triton.jit
def load_gradient(
    dout, image, images, PIXELS: tl.constexpr, POOLED: tl.constexpr, BOUNDED: tl.constexpr, HINT: tl.constexpr
):
    """The gradient of some images of a row; if pooled, every pixel's share."""
    if POOLED:
        share = tl.load(dout + image, mask=image < images, other=0.0) * (1.0 / PIXELS)
        dx = share[:, None] + tl.zeros([1, PIXELS], tl.float32)
    else:
        dx = load_tile(dout, image, images, PIXELS, BOUNDED, HINT)
    return dx


@triton.jit
def tile_projections(y, b, dout, image, images, PIXELS: tl.constexpr, POOLED: tl.constexpr, BOUNDED: tl.constexpr):
    """What some images of a row add to Σ dx and Σ dx g; nothing beyond the last image, since dx is zero there."""
    dx = load_gradient(dout, image, images, PIXELS, POOLED, BOUNDED, AGAIN)
    return dx, dx * gelu(load_tile(y, image, images, PIXELS, BOUNDED, AGAIN) + b)


@triton.jit
def tile_gradient(
    y, b, dout, dy, mask, a, c, e, image, images,
    PIXELS: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr, BOUNDED: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Write dy of some images and return it, to be summed."""
    dx = load_gradient(dout, image, images, PIXELS, POOLED, BOUNDED, AFTER)
    g, slope = gelu_and_slope(load_tile(y, image, images, PIXELS, BOUNDED, NO_MORE) + b)
    correction = c * g + e
    if MASKED:
        correction *= load_kept(mask, image, images)
    gradient = slope * (a * dx - correction)
    if BOUNDED:
        gradient = tl.where((image < images)[:, None], gradient, 0.0)
    store_tile(dy, image, images, gradient, PIXELS, BOUNDED, AFTER)
    return gradient


@triton.jit
def row_gradient(
    y, b, dout, scale, mean, rstd, mask, dy, images,
    PIXELS: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr,
    TILE: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Write dy of a row, with all pointers at the row, and return the gradients of bias, gamma and beta.

    `AFTER` is the cache hint for dout and dy: whether they are read again afterwards.
    """
    count = row_count(mask, images, PIXELS, MASKED)
    whole = images // TILE * TILE
    sum_dx = tl.zeros([TILE, PIXELS], tl.float32)
    sum_dxg = tl.zeros([TILE, PIXELS], tl.float32)
    for start in tl.range(0, whole, TILE, num_stages=STAGES):
        image = start + tl.arange(0, TILE)
        more, more_g = tile_projections(y, b, dout, image, images, PIXELS, POOLED, False)
        sum_dx += more
        sum_dxg += more_g
    total, projected = tl.sum(sum_dx), tl.sum(sum_dxg)
    for start in range(whole, images, TAIL):
        rest = start + tl.arange(0, TAIL)
        last, last_g = tile_projections(y, b, dout, rest, images, PIXELS, POOLED, True)
        total += tl.sum(last)
        projected += tl.sum(last_g)
    projected = (projected - mean * total) * rstd

    # dg = γ/σ (dx − Σdx/n − ĝ Σ(dx ĝ)/n), written as a·dx − (c·g + e)
    a = scale * rstd
    c = a * rstd * projected / count
    e = a * total / count - c * mean
    total_dy = 0.0
    for start in range(whole, images, TAIL):
        rest = start + tl.arange(0, TAIL)
        last = tile_gradient(y, b, dout, dy, mask, a, c, e, rest, images, PIXELS, MASKED, POOLED, True, AFTER)
        total_dy += tl.sum(last)
    sum_dy = tl.zeros([TILE, PIXELS], tl.float32)
    for done in tl.range(0, whole, TILE, num_stages=STAGES):
        image = whole - TILE - done + tl.arange(0, TILE)
        sum_dy += tile_gradient(y, b, dout, dy, mask, a, c, e, image, images, PIXELS, MASKED, POOLED, False, AFTER)
    return total_dy + tl.sum(sum_dy), projected, total


@triton.jit
def norm_backward(
    y, dout, bias, gamma, mask, mean_in, rstd_in, dy, dbias, dgamma, dbeta,
    bias_stride, gamma_stride, channels, images,
    PIXELS: tl.constexpr, MASKED: tl.constexpr, POOLED: tl.constexpr,
    TILE: tl.constexpr, TAIL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of `norm_forward` with respect to y, bias, gamma and beta."""
    row = tl.program_id(0)
    client, channel = (row // channels).to(tl.int64), row % channels
    b = tl.load(bias + client * bias_stride + channel)
    scale = tl.load(gamma + client * gamma_stride + channel)
    first = row.to(tl.int64) * images
    dout += first if POOLED else first * PIXELS
    if MASKED:
        mask += client * images
    bias_gradient, gamma_gradient, beta_gradient = row_gradient(
        y + first * PIXELS, b, dout, scale, tl.load(mean_in + row), tl.load(rstd_in + row), mask, dy + first * PIXELS,
        images, PIXELS, MASKED, POOLED, TILE, TAIL, STAGES, NO_MORE,
    )  # fmt: skip
    tl.store(dbias + row, bias_gradient)
    tl.store(dgamma + row, gamma_gradient)
    tl.store(dbeta + row, beta_gradient)
