"""The stacked operations in plain PyTorch: any device, any floating-point dtype, differentiable by autograd.

Maps are `[C, D, B, H, W]`: clients, channels, images of the batch, rows, columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Norm(NamedTuple):
    """A stacked BatchNorm layer: its parameters, its running statistics and its options."""

    weight: Tensor
    """γ, `[C, D]`."""
    bias: Tensor
    """β, `[C, D]`."""
    running_mean: Tensor
    running_var: Tensor
    momentum: float
    eps: float
    frozen: bool = False
    """Whether the layer is in evaluation mode: it uses the running statistics and does not update them."""


class GroupNorm(NamedTuple):
    """A stacked GroupNorm layer."""

    weight: Tensor
    """γ, `[C, D]`."""
    bias: Tensor
    """β, `[C, D]`."""
    groups: int
    eps: float


class Normed(NamedTuple):
    """The result of a layer with a norm: its output and, of BatchNorm, the new running statistics."""

    output: Tensor
    running_mean: Tensor | None = None
    running_var: Tensor | None = None


def normalise(g: Tensor, norm: Norm | GroupNorm, mask: Tensor | None) -> Normed:
    """BatchNorm or GroupNorm."""
    return Normed(group_norm(g, norm)) if isinstance(norm, GroupNorm) else batch_norm(g, norm, mask)


def batch_norm(g: Tensor, norm: Norm, mask: Tensor | None) -> Normed:
    """BatchNorm; in training, over the images that each client's row of `mask` `[C, B]` marks (None: all)."""
    if norm.frozen:
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        shift = norm.bias - norm.running_mean * scale
        output = g * scale[:, :, None, None, None] + shift[:, :, None, None, None]
        return Normed(output, norm.running_mean, norm.running_var)
    keep = g.new_ones(1, 1, g.shape[2], 1, 1) if mask is None else mask.to(g.dtype)[:, None, :, None, None]
    count = (keep.sum(dim=2, keepdim=True) * g.shape[3] * g.shape[4]).clamp(min=1)
    mean = (g * keep).sum(dim=(2, 3, 4), keepdim=True) / count
    centred = g - mean
    variance = (centred.square() * keep).sum(dim=(2, 3, 4), keepdim=True) / count
    scale = norm.weight[:, :, None, None, None] * torch.rsqrt(variance + norm.eps)
    output = centred * scale + norm.bias[:, :, None, None, None]
    with torch.no_grad():
        unbiased = variance * count / (count - 1).clamp(min=1)
        new_mean = torch.lerp(norm.running_mean, mean[:, :, 0, 0, 0].to(norm.running_mean.dtype), norm.momentum)
        new_var = torch.lerp(norm.running_var, unbiased[:, :, 0, 0, 0].to(norm.running_var.dtype), norm.momentum)
    return Normed(output, new_mean, new_var)


def gelu_norm(y: Tensor, bias: Tensor, norm: Norm | GroupNorm, mask: Tensor | None, pooled: bool) -> Normed:
    """norm(gelu(y + bias)), or its mean over the pixels, `[C, D, B]`."""
    normed = normalise(F.gelu(y + bias[:, :, None, None, None]), norm, mask)
    return normed._replace(output=normed.output.mean(dim=(3, 4))) if pooled else normed


def depthwise(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    """A depthwise convolution with zero padding that keeps the size; `taps` is `[C, D, 1, k, k]`, k odd."""
    clients, channels, images, height, width = x.shape
    maps = x.permute(2, 0, 1, 3, 4).reshape(images, clients * channels, height, width)
    y = F.conv2d(maps, taps.flatten(0, 1), bias.flatten(), padding=taps.shape[-1] // 2, groups=clients * channels)
    return y.view(images, clients, channels, height, width).permute(1, 2, 0, 3, 4)


def depthwise_gelu_norm(x: Tensor, taps: Tensor, bias: Tensor, norm: Norm | GroupNorm, mask: Tensor | None) -> Normed:
    """x + norm(gelu(depthwise(x) + bias))."""
    normed = normalise(F.gelu(depthwise(x, taps, bias)), norm, mask)
    return normed._replace(output=x + normed.output)


def group_norm(g: Tensor, norm: GroupNorm) -> Tensor:
    """GroupNorm: every image is normalised separately, over each group of channels."""
    clients, channels, images, height, width = g.shape
    maps = g.permute(2, 0, 1, 3, 4).reshape(images, clients * channels, height, width)
    normed = F.group_norm(maps, clients * norm.groups, norm.weight.flatten(), norm.bias.flatten(), norm.eps)
    return normed.view(images, clients, channels, height, width).permute(1, 2, 0, 3, 4)


def pointwise(weight: Tensor, x: Tensor) -> Tensor:
    """A 1×1 convolution without bias: `[C, E, D]` times maps `[C, D, B, H, W]`."""
    return torch.bmm(weight, x.flatten(2)).view(*weight.shape[:2], *x.shape[2:])


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of each client's own table `[C, V, E]` at its tokens `[C, …]`."""
    clients, vocabulary, _ = table.shape
    first = torch.arange(clients, device=tokens.device).view(-1, *[1] * (tokens.dim() - 1)) * vocabulary
    return F.embedding(tokens + first, table.flatten(0, 1))


def lstm_layer(x: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor) -> Tensor:
    """One LSTM layer from a zero state, time first: inputs `[C, T, B, I]` to outputs `[C, T, B, H]`.

    Gates come in PyTorch's order i, f, g, o: `w_ih` is `[C, 4, H, I]`, `w_hh` is `[C, 4, H, H]`, `bias` is `[C, 4, H]`.
    """
    clients, steps, batch, _ = x.shape
    size = w_hh.shape[-1]
    projected = torch.baddbmm(bias.flatten(1)[:, None, :], x.flatten(1, 2), w_ih.flatten(1, 2).transpose(1, 2))
    recurrent = w_hh.flatten(1, 2).transpose(1, 2)
    h = x.new_zeros(clients, batch, size)
    c = x.new_zeros(clients, batch, size)
    outputs = []
    for now in projected.view(clients, steps, batch, 4 * size).unbind(1):
        i, f, g, o = torch.baddbmm(now, h, recurrent).chunk(4, dim=2)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs, dim=1)
