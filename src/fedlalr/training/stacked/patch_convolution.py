"""The convolution of many clients as a batched matrix product over patches, for GPUs.

cuDNN has no forward kernel for a convolution with many groups and runs the groups one by one, in bfloat16 for the
weight gradient too; its input gradient is fast. With patches, the forward pass and the weight gradient are one batched
product each, at the cost of memory for the patches. Images are laid out as `[C, B, height, width, channels]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedlalr.training.torch_internals import convolution_backward

Sizes = tuple[int, ...]


class PatchConvolution(torch.autograd.Function):
    """Images `[C, B, i, h, w]` and kernels `[C, o, i, k, l]` to `[C, B, o, h', w']`, one group per client."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
        clients, features = weight.shape[:2]
        patches = cut(images, weight.shape[3:], stride, padding, dilation)
        kernels = weight.permute(0, 3, 4, 2, 1).reshape(clients, -1, features)
        ctx.save_for_backward(weight, patches)
        ctx.shape, ctx.options = images.shape, (stride, padding, dilation)
        return torch.bmm(patches.flatten(1, 3).flatten(2), kernels).view(*patches.shape[:4], features).movedim(4, 2)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        weight, patches = ctx.saved_tensors
        slope = slopes[0]
        clients, features, channels = weight.shape[:3]
        flat = slope.movedim(2, 4).reshape(clients, -1, features)
        of_weight = torch.bmm(patches.flatten(1, 3).flatten(2).mT, flat)
        of_weight = of_weight.view(clients, *weight.shape[3:], channels, features).permute(0, 4, 3, 1, 2)
        of_images = _input_gradient(ctx.shape, weight, slope, *ctx.options) if ctx.needs_input_grad[0] else None
        return of_images, of_weight, None, None, None


def cut(images: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> Tensor:
    """All patches under the kernel, copied: `[C, B, h', w', k, l, channels]`."""
    places = images.movedim(2, 4)
    if any(padding):
        places = F.pad(places, (0, 0, padding[1], padding[1], padding[0], padding[0]))
    places = places.contiguous()
    clients, batch, height, width, channels = places.shape
    rows, columns = (
        (length - step * (size - 1) - 1) // hop + 1
        for length, size, hop, step in zip((height, width), kernel, stride, dilation, strict=True)
    )
    of_client, of_image, of_row, of_column, _ = places.stride()
    steps = of_row * stride[0], of_column * stride[1], of_row * dilation[0], of_column * dilation[1]
    view = places.as_strided((clients, batch, rows, columns, *kernel, channels), (of_client, of_image, *steps, 1))
    return view.contiguous()


def _input_gradient(
    shape: Sizes, weight: Tensor, slope: Tensor, stride: Sizes, padding: Sizes, dilation: Sizes
) -> Tensor:
    """The gradient of the images, by the library's grouped convolution."""
    clients, batch, channels = shape[:3]
    above = slope.movedim(0, 1).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    # The gradient does not depend on the images; the library only reads their shape and layout.
    size = (batch, clients * channels, *shape[3:])
    below = torch.empty(size, dtype=slope.dtype, device=slope.device, memory_format=torch.channels_last)
    options = (stride, padding, dilation, False, (0, 0), clients, (True, False, False))
    gradient = convolution_backward(above, below, weight.flatten(0, 1), None, *options)[0]
    return torch.as_tensor(gradient).view(batch, clients, channels, *shape[3:]).movedim(1, 0)
