"""The fused operations on stacked maps `[C, D, B, H, W]` in bfloat16: autograd around the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fedlalr.training.kernels.depthwise_triton import (
    depthwise_alone,
    depthwise_backward,
    depthwise_forward,
    depthwise_norm_backward,
)
from fedlalr.training.kernels.frozen_triton import frozen_depthwise, frozen_norm
from fedlalr.training.kernels.group_norm_triton import group_backward, group_forward
from fedlalr.training.kernels.norm_triton import norm_backward, norm_forward
from fedlalr.training.kernels.plain import GroupNorm, Norm, Normed
from fedlalr.training.kernels.products import pointwise as pointwise  # one of the operations

# Tile sizes and launch options, tuned on an H200. TILE, TAIL: images per tile of a pass over a row, and per tile of its
# remainder. STAGES: tiles being loaded at once. ROWS, WINDOWS, PRODUCTS: image rows per block of the convolution,
# blocks per product, products per program. PIECE: images per program. NORM_FORWARD counts TILE in pixels, so that
# registers hold the same amount of any map.
NORM_FORWARD = {"TILE": 1024, "HELD": 16, "num_warps": 8, "maxnreg": 64}
NORM_BACKWARD = {"TILE": 8, "TAIL": 2, "STAGES": 1, "num_warps": 8, "maxnreg": 40}
DEPTHWISE_FORWARD = {"TILE": 8, "TAIL": 2, "STAGES": 3, "ROWS": 4, "WINDOWS": 64, "num_warps": 4, "num_stages": 1}
DEPTHWISE_BACKWARD = {"ROWS": 2, "WINDOWS": 64, "num_warps": 4, "num_stages": 1}
DEPTHWISE_NORM_BACKWARD = {"TILE": 4, "TAIL": 2, "STAGES": 4, "ROWS": 2, "WINDOWS": 64, "num_warps": 4, "maxnreg": 96}
FROZEN_NORM = {"TILE": 16, "num_warps": 4}
DEPTHWISE = {"ROWS": 4, "WINDOWS": 64, "PRODUCTS": 4, "num_warps": 4, "num_stages": 1}
GROUP_FORWARD = {"PIECE": 4, "num_warps": 4}
GROUP_BACKWARD = {"num_warps": 8, "maxnreg": 64}


def supported(height: int, width: int, kernel: int) -> bool:
    """Whether the kernels support maps and a depthwise convolution of this size."""
    return width in (8, 16) and height in (4, 8, 16) and kernel in (3, 5)


def groups_supported(channels: int) -> bool:
    """Whether the kernels support groups of this many channels: a program holds a whole group of an image."""
    return channels in (1, 2, 4, 8, 16)


class _GeluNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, norm: Norm, mask: Tensor | None, pooled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, bias, weight, shift = y.contiguous(), _rows(bias), _rows(weight), _rows(shift)
        clients, channels, images = y.shape[:3]
        out = torch.empty(y.shape[:3], device=y.device) if pooled else torch.empty_like(y)
        mean, rstd, new_mean, new_var = torch.empty(4, clients, channels, device=y.device).unbind()
        pixels = y[0, 0, 0].numel()
        tile = NORM_FORWARD["TILE"] // pixels
        held = min(NORM_FORWARD["HELD"], triton.cdiv(images, tile))
        norm_forward[(clients * channels,)](
            y, bias, weight, shift, norm.running_mean, norm.running_var, mask, out, mean, rstd, new_mean, new_var,
            bias.stride(0), weight.stride(0), shift.stride(0), channels, images, norm.momentum, norm.eps,
            PIXELS=pixels, MASKED=mask is not None, POOLED=pooled, **{**NORM_FORWARD, "TILE": tile, "HELD": held},
        )  # fmt: skip
        ctx.save_for_backward(y, bias, weight, mean, rstd, mask)
        ctx.pooled = pooled
        ctx.mark_non_differentiable(new_mean, new_var)
        return out, new_mean, new_var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        y, bias, weight, mean, rstd, mask = ctx.saved_tensors
        clients, channels, images = y.shape[:3]
        dy = torch.empty_like(y)
        dbias, dweight, dshift = torch.empty(3, clients, channels, device=y.device).unbind()
        norm_backward[(clients * channels,)](
            y, dout.contiguous(), bias, weight, mask, mean, rstd, dy, dbias, dweight, dshift,
            bias.stride(0), weight.stride(0), channels, images,
            PIXELS=y[0, 0, 0].numel(), MASKED=mask is not None, POOLED=ctx.pooled, **NORM_BACKWARD,
        )  # fmt: skip
        return dy, dbias, dweight, dshift, None, None, None


class _DepthwiseGeluNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, taps: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, norm: Norm, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, bias, weight, shift = x.contiguous(), _rows(bias), _rows(weight), _rows(shift)
        clients, channels, images, height, width = x.shape
        table = tap_table(taps, width)
        y, out = torch.empty_like(x), torch.empty_like(x)
        mean, rstd, new_mean, new_var = torch.empty(4, clients, channels, device=x.device).unbind()
        depthwise_forward[(clients * channels,)](
            x, table, bias, weight, shift, norm.running_mean, norm.running_var, mask, y, out,
            mean, rstd, new_mean, new_var,
            bias.stride(0), weight.stride(0), shift.stride(0), channels, images, norm.momentum, norm.eps,
            WIDTH=width, BLOCKS=height // DEPTHWISE_FORWARD["ROWS"], MASKED=mask is not None, **DEPTHWISE_FORWARD,
        )  # fmt: skip
        ctx.save_for_backward(x, y, table, weight, mean, rstd, mask)
        ctx.taps_shape = taps.shape
        ctx.mark_non_differentiable(new_mean, new_var)
        return out, new_mean, new_var

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, y, table, weight, mean, rstd, mask = ctx.saved_tensors
        clients, channels, images, height, width = x.shape
        dx, dtaps = torch.empty_like(x), torch.empty(ctx.taps_shape, device=x.device)
        dbias, dweight, dshift = torch.empty(3, clients, channels, device=x.device).unbind()
        rows = DEPTHWISE_NORM_BACKWARD["ROWS"]
        scratch = torch.empty(clients * channels, 8 * width, rows * width, device=x.device)
        depthwise_norm_backward[(clients * channels,)](
            x, y, dout.contiguous(), table, weight, mask, mean, rstd, dx, dtaps, dbias, dweight, dshift, scratch,
            weight.stride(0), channels, images, KERNEL=ctx.taps_shape[-1], TAPS=32,
            WIDTH=width, BLOCKS=height // rows, MASKED=mask is not None, **DEPTHWISE_NORM_BACKWARD,
        )  # fmt: skip
        return dx, dtaps, dbias, dweight, dshift, None, None


class _GeluGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, groups: int, eps: float, pooled: bool
    ) -> Tensor:
        y, bias, norm = y.contiguous(), _rows(bias), GroupNorm(_rows(weight), _rows(shift), groups, eps)
        out, mean, rstd = _group_norm(y, None, bias, norm, pooled)
        ctx.save_for_backward(y, bias, norm.weight, mean, rstd)
        ctx.pooled = pooled
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, bias, weight, mean, rstd = ctx.saved_tensors
        gradients = _group_norm_gradients(dout.contiguous(), y, bias, weight, mean, rstd, ctx.pooled)
        return *gradients, None, None, None


class _DepthwiseGeluGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, taps: Tensor, bias: Tensor, weight: Tensor, shift: Tensor, groups: int, eps: float
    ) -> Tensor:
        x, bias, norm = x.contiguous(), _rows(bias), GroupNorm(_rows(weight), _rows(shift), groups, eps)
        clients, channels, images, height, width = x.shape
        table, y = tap_table(taps, width), torch.empty_like(x)
        blocks = height // DEPTHWISE["ROWS"]
        pieces = triton.cdiv(images * blocks, DEPTHWISE["WINDOWS"] * DEPTHWISE["PRODUCTS"])
        depthwise_alone[(clients * channels * pieces,)](
            x, table, bias, y, bias.stride(0), channels, images, pieces, WIDTH=width, BLOCKS=blocks, **DEPTHWISE
        )
        out, mean, rstd = _group_norm(y, x, None, norm, pooled=False)
        ctx.save_for_backward(x, table, y, norm.weight, mean, rstd)
        ctx.taps_shape = taps.shape
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, table, y, weight, mean, rstd = ctx.saved_tensors
        dout = dout.contiguous()
        dy, dbias, dweight, dshift = _group_norm_gradients(dout, y, None, weight, mean, rstd, pooled=False)
        clients, channels, images, height, width = x.shape
        dx, dtaps = torch.empty_like(x), torch.empty(ctx.taps_shape, device=x.device)
        rows = DEPTHWISE_BACKWARD["ROWS"]
        scratch = torch.empty(clients * channels, 8 * width, rows * width, device=x.device)
        depthwise_backward[(clients * channels,)](
            x, dy, dout, table, dx, dtaps, scratch, images,
            KERNEL=ctx.taps_shape[-1], TAPS=32, WIDTH=width, BLOCKS=height // rows, **DEPTHWISE_BACKWARD,
        )  # fmt: skip
        return dx, dtaps, dbias, dweight, dshift, None, None


def gelu_norm(y: Tensor, bias: Tensor, norm: Norm | GroupNorm, mask: Tensor | None, pooled: bool) -> Normed:
    """norm(gelu(y + bias)), or its mean over the pixels in float32, `[C, D, B]`."""
    if isinstance(norm, GroupNorm):
        return Normed(_GeluGroupNorm.apply(y, bias, *norm, pooled))
    if norm.frozen:
        return Normed(_frozen_gelu_norm(y, bias, _contiguous(norm), pooled), norm.running_mean, norm.running_var)
    parts = _GeluNorm.apply(y, bias, norm.weight, norm.bias, _contiguous(norm), _kept(mask), pooled)
    return Normed(*parts)


def depthwise_gelu_norm(x: Tensor, taps: Tensor, bias: Tensor, norm: Norm | GroupNorm, mask: Tensor | None) -> Normed:
    """x + norm(gelu(depthwise(x) + bias))."""
    if isinstance(norm, GroupNorm):
        return Normed(_DepthwiseGeluGroupNorm.apply(x, taps, bias, *norm))
    if norm.frozen:
        return Normed(_frozen_depthwise(x, taps, bias, _contiguous(norm)), norm.running_mean, norm.running_var)
    parts = _DepthwiseGeluNorm.apply(x, taps, bias, norm.weight, norm.bias, _contiguous(norm), _kept(mask))
    return Normed(*parts)


def _group_norm(
    y: Tensor, x: Tensor | None, bias: Tensor | None, norm: GroupNorm, pooled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """GN(gelu(y + bias)), plus x if given, and the means and 1/σ, `[C, G, B]`."""
    clients, channels, images = y.shape[:3]
    out = torch.empty(y.shape[:3], device=y.device) if pooled else torch.empty_like(y)
    mean, rstd = torch.empty(2, clients, norm.groups, images, device=y.device).unbind()
    pieces = triton.cdiv(images, GROUP_FORWARD["PIECE"])
    group_forward[(clients * norm.groups * pieces,)](
        y, x, bias, norm.weight, norm.bias, out, mean, rstd,
        0 if bias is None else bias.stride(0), norm.weight.stride(0), norm.bias.stride(0),
        norm.groups, images, pieces, norm.eps,
        CHANNELS=channels // norm.groups, PIXELS=y[0, 0, 0].numel(), BIASED=bias is not None,
        RESIDUAL=x is not None, POOLED=pooled, **GROUP_FORWARD,
    )  # fmt: skip
    return out, mean, rstd


def _group_norm_gradients(
    dout: Tensor, y: Tensor, bias: Tensor | None, weight: Tensor, mean: Tensor, rstd: Tensor, pooled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of y, the bias, γ and β."""
    (clients, channels, images), groups = y.shape[:3], mean.shape[1]
    dy = torch.empty_like(y)
    dbias, dweight, dshift = torch.empty(3, clients, channels, device=y.device).unbind()
    group_backward[(clients * groups,)](
        y, dout, bias, weight, mean, rstd, dy, dbias, dweight, dshift,
        0 if bias is None else bias.stride(0), weight.stride(0), groups, images,
        CHANNELS=channels // groups, PIXELS=y[0, 0, 0].numel(), BIASED=bias is not None, POOLED=pooled,
        **GROUP_BACKWARD,
    )  # fmt: skip
    return dy, dbias, dweight, dshift


def _frozen_gelu_norm(y: Tensor, bias: Tensor, norm: Norm, pooled: bool) -> Tensor:
    """`gelu_norm` in evaluation mode, without gradients."""
    y, bias, weight, shift = y.contiguous(), _rows(bias), _rows(norm.weight), _rows(norm.bias)
    clients, channels, images = y.shape[:3]
    pieces = triton.cdiv(images, FROZEN_NORM["TILE"])
    out = torch.empty(y.shape[:3], device=y.device) if pooled else torch.empty_like(y)
    frozen_norm[(clients * channels * pieces,)](
        y, bias, weight, shift, norm.running_mean, norm.running_var, out,
        bias.stride(0), weight.stride(0), shift.stride(0), channels, images, pieces, norm.eps,
        PIXELS=y[0, 0, 0].numel(), POOLED=pooled, **FROZEN_NORM,
    )  # fmt: skip
    return out


def _frozen_depthwise(x: Tensor, taps: Tensor, bias: Tensor, norm: Norm) -> Tensor:
    """`depthwise_gelu_norm` in evaluation mode, without gradients."""
    x, bias, weight, shift = x.contiguous(), _rows(bias), _rows(norm.weight), _rows(norm.bias)
    clients, channels, images, height, width = x.shape
    blocks = height // DEPTHWISE["ROWS"]
    pieces = triton.cdiv(images * blocks, DEPTHWISE["WINDOWS"] * DEPTHWISE["PRODUCTS"])
    out = torch.empty_like(x)
    frozen_depthwise[(clients * channels * pieces,)](
        x, tap_table(taps, width), bias, weight, shift, norm.running_mean, norm.running_var, out,
        bias.stride(0), weight.stride(0), shift.stride(0), channels, images, pieces, norm.eps,
        WIDTH=width, BLOCKS=blocks, **DEPTHWISE,
    )  # fmt: skip
    return out


def tap_table(taps: Tensor, width: int) -> Tensor:
    """The taps `[C, D, 1, k, k]` surrounded by zeros, `[C, D, 11, 2 W]`, with the middle one at (5, W)."""
    half = taps.shape[-1] // 2
    return F.pad(taps[:, :, 0].to(torch.bfloat16), (width - half, width - half - 1, 5 - half, 5 - half))


def _rows(parameter: Tensor) -> Tensor:
    """A stacked parameter `[C, D]` with contiguous rows; with gaps between them if it is a view of `[C, P]`."""
    return parameter if parameter.stride(-1) == 1 else parameter.contiguous()


def _contiguous(norm: Norm) -> Norm:
    return norm._replace(running_mean=norm.running_mean.contiguous(), running_var=norm.running_var.contiguous())


def _kept(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.to(torch.float32).contiguous()
