"""Convolutions of a stack of clients, each with its own kernels: autograd around the Triton kernels.

In float32 the products run in TF32 if torch allows that for convolutions, else as three TF32 products that together
have float32's precision; in half precision they accumulate in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedlalr.training.kernels import float32_products
from fedlalr.training.kernels.convolution_triton import convolve, max_pool, max_pool_backward, weight_gradient

Sizes = tuple[int, ...]

# Places, features and weights per block, and launch options, tuned on an H200.
FORWARD = {"PLACES": 256, "WEIGHTS": 32, "num_warps": 4, "num_stages": 2}
INPUT_GRADIENT = {**FORWARD, "num_stages": 3}
WEIGHT_GRADIENT = {"PLACES": 32, "num_warps": 4, "num_stages": 3}
POOLING = {"BLOCK": 512, "num_warps": 4}
MOST_PRODUCTS = 3
"""Products of a weight gradient's program with the same slopes."""
PROGRAMS = 1024
"""The number of programs that keeps a large GPU busy; a weight gradient's places are split among them."""


class StackedConvolution(torch.autograd.Function):
    """Images `[C, B, i, h, w]`, kernels `[C, o, i, k, l]` and biases `[C, o]` to `[C, B, o, h', w']`.

    Computes in the images' dtype; the gradients of kernels and biases are float32. Channels are innermost in memory,
    also in the result.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, *options: Sizes) -> Tensor:
        """The options are stride, padding and dilation."""
        places = images.movedim(2, 4).contiguous()
        clients, batch, height, width, _ = places.shape
        features, _, *kernel = weight.shape[1:]
        rows, columns = (
            (length + 2 * pad - hop * (size - 1) - 1) // step + 1
            for length, size, step, pad, hop in zip((height, width), kernel, *options, strict=True)
        )
        kernels = weight.to(images.dtype).permute(0, 3, 4, 2, 1).contiguous()
        out = places.new_empty(clients, batch, rows, columns, features)
        shifts = bias if bias is None or bias.stride(-1) == 1 else bias.contiguous()
        _convolve(places, kernels, shifts, out, options, transposed=False)
        ctx.save_for_backward(places, weight)
        ctx.options, ctx.biased = options, bias is not None
        return out.movedim(4, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        places, weight = ctx.saved_tensors
        slope = slope.movedim(2, 4).contiguous()
        of_images = of_bias = None
        if ctx.needs_input_grad[0]:
            kernels = weight.to(slope.dtype).permute(0, 3, 4, 1, 2).contiguous()
            of_images = torch.empty_like(places)
            _convolve(slope, kernels, None, of_images, ctx.options, transposed=True)
            of_images = of_images.movedim(4, 2)
        if ctx.biased:
            of_bias = slope.flatten(1, 3).sum(1, dtype=torch.float32)
        return of_images, _weight_gradient(places, slope, weight.shape, ctx.options), of_bias, None, None, None


class StackedPooling(torch.autograd.Function):
    """Max-pooling over windows that do not overlap. Images are `[N, i, h, w]` with channels innermost in memory."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, *kernel: int) -> Tensor:
        places = images.movedim(1, 3)
        count, height, width, channels = places.shape
        out = places.new_empty(count, height // kernel[0], width // kernel[1], channels)
        which = torch.empty_like(out, dtype=torch.uint8)
        max_pool[(-(-out.numel() // POOLING["BLOCK"]),)](
            places, out, which, out.numel(), height, width, *out.shape[1:],
            KERNEL_H=kernel[0], KERNEL_W=kernel[1], **POOLING,
        )  # fmt: skip
        ctx.save_for_backward(which)
        ctx.kernel, ctx.shape = kernel, places.shape
        return out.movedim(3, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        (which,) = ctx.saved_tensors
        slope = slope.movedim(1, 3).contiguous()
        height, width = ctx.shape[1:3]
        whole = height % ctx.kernel[0] == width % ctx.kernel[1] == 0
        out = (slope.new_empty if whole else slope.new_zeros)(ctx.shape)
        max_pool_backward[(-(-slope.numel() // POOLING["BLOCK"]),)](
            slope, which, out, slope.numel(), height, width, *slope.shape[1:],
            KERNEL_H=ctx.kernel[0], KERNEL_W=ctx.kernel[1], **POOLING,
        )  # fmt: skip
        return out.movedim(3, 1), None, None


def _convolve(
    x: Tensor, kernels: Tensor, bias: Tensor | None, out: Tensor, options: tuple[Sizes, ...], transposed: bool
) -> None:
    clients, images, rows, columns, features = out.shape
    _, height, width, channels = x.shape[1:]
    block, launch = block_size(features), INPUT_GRADIENT if transposed else FORWARD
    places = images * rows * columns
    grid = (-(-places // launch["PLACES"]), -(-features // block), clients)
    convolve[grid](
        x, kernels, bias, out, 0 if bias is None else bias.stride(0), images, height, width, rows, columns, features,
        *(size for option in options for size in option),
        CHANNELS=channels, KERNEL_H=kernels.shape[1], KERNEL_W=kernels.shape[2], TRANSPOSED=transposed,
        STRIDED=max(options[0]) > 1, PADDED=transposed or max(options[1]) > 0,
        BIASED=bias is not None, PRECISION=precision(), FEATURES=block, **launch,
    )  # fmt: skip


def _weight_gradient(x: Tensor, slope: Tensor, shape: torch.Size, options: tuple[Sizes, ...]) -> Tensor:
    clients, images, rows, columns, features = slope.shape
    _, height, width, channels = x.shape[1:]
    kernel = shape[3:]
    weights = kernel[0] * kernel[1] * channels
    block, beside = block_size(features), block_size(min(weights, 32))
    products = min(MOST_PRODUCTS, -(-weights // beside))
    blocks = (-(-weights // (products * beside)), -(-features // block))
    places = images * rows * columns
    parts = max(1, min(PROGRAMS // (blocks[0] * blocks[1] * clients), -(-places // 512)))
    share = -(-places // (parts * WEIGHT_GRADIENT["PLACES"])) * WEIGHT_GRADIENT["PLACES"]
    out = torch.empty(parts, clients, weights, features, device=x.device, dtype=torch.float32)
    weight_gradient[(*blocks, parts * clients)](
        x, slope, out, clients, images, height, width, rows, columns, features,
        *(size for option in options for size in option),
        CHANNELS=channels, KERNEL_H=kernel[0], KERNEL_W=kernel[1], PADDED=max(options[1]) > 0, PRECISION=precision(),
        SHARE=share, FEATURES=block, WEIGHTS=beside, PRODUCTS=products, **WEIGHT_GRADIENT,
    )  # fmt: skip
    total = out[0] if parts == 1 else out.sum(0)
    return total.view(clients, *kernel, channels, features).permute(0, 4, 3, 1, 2)


def block_size(size: int) -> int:
    """The tensor-core block size that covers this many rows or columns, or a part of them.

    >>> block_size(3), block_size(27), block_size(64), block_size(288)
    (16, 32, 64, 64)
    """
    return min(max(16, 1 << (size - 1).bit_length()), 64)


def precision() -> str:
    """How float32 is multiplied, according to torch's setting for convolutions."""
    return float32_products(torch.backends.cudnn.allow_tf32)
