"""Convolution, pooling and group normalisation of a stack of clients, with the channels of all clients side by side.

C clients with kernels of their own are one convolution with C groups. vmap puts the channels outermost, where libraries
have hardly any kernels for groups; here they are innermost (torch's `channels_last`), and stay there from one layer to
the next without copying.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlalr.training.kernels import kernels_available
from fedlalr.training.stacked.patch_convolution import PatchConvolution, Sizes

Dims = tuple[int | None, ...]
"""The client dimension of each argument; None for what all clients share."""
PRODUCTS_ON = frozenset({"cuda"})
"""Devices where convolutions are products over patches; elsewhere the library's grouped convolution is faster."""


LARGEST_WINDOW = 64
"""Pixels up to which the kernel for max-pooling, which reads a window pixel by pixel, is used."""


class Batched(torch.autograd.Function):
    """A function with its own rule for vmap. Outside vmap it has no gradient, and nothing calls it there."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass


class GroupedConvolution(Batched):
    """A convolution that can be batched over kernels."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        return F.conv2d(input, weight, bias, *options)

    @staticmethod
    def vmap(
        info: Any, in_dims: Dims, input: Tensor, weight: Tensor, bias: Tensor | None, *options: Any
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        if in_dims[1] is None and (bias is None or in_dims[2] is None):  # one model for all clients: one long batch
            images = stacked(input, in_dims[0], clients)
            output = F.conv2d(images.flatten(0, 1), weight, bias, *options)
            return output.view(*images.shape[:2], *output.shape[1:]), 0
        if input.device.type in PRODUCTS_ON:
            return product_convolution(input, weight, bias, in_dims, clients, *options), 0
        images = beside(input, in_dims[0], clients)
        kernels = stacked(weight, in_dims[1], clients).flatten(0, 1)
        shifts = None if bias is None else stacked(bias, in_dims[2], clients).flatten()
        stride, padding, dilation = options
        output = F.conv2d(images, kernels, shifts, stride, padding, dilation, clients)
        return apart(output, clients), 0


class GroupedPooling(Batched):
    """Max-pooling over the channels of all clients."""

    @staticmethod
    def forward(input: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool) -> Tensor:
        return F.max_pool2d(input, kernel, stride, padding, dilation, ceil)

    @staticmethod
    def vmap(info: Any, in_dims: Dims, input: Tensor, *options: Any) -> tuple[Tensor, int]:
        clients = info.batch_size
        images = stacked(input, in_dims[0], clients)
        if images.stride(0) == images.shape[1] * images.stride(1):  # clients outermost: one long batch
            pooled = pool(images.flatten(0, 1), *options)
            return pooled.view(*images.shape[:2], *pooled.shape[1:]), 0
        return apart(F.max_pool2d(beside(input, in_dims[0], clients), *options), clients), 0


class GroupedNormalisation(Batched):
    """Group normalisation with the groups of all clients side by side."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
        return F.group_norm(input, groups, weight, bias, eps)

    @staticmethod
    def vmap(
        info: Any, in_dims: Dims, input: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        scales, shifts = (
            None if tensor is None else stacked(tensor, dim, clients).flatten()
            for tensor, dim in ((weight, in_dims[1]), (bias, in_dims[2]))
        )
        images = beside(input, in_dims[0], clients)
        return apart(F.group_norm(images, clients * groups, scales, shifts, eps), clients), 0


class GroupedConv2d(nn.Conv2d):
    """Stands in for a stock `nn.Conv2d` with one group."""

    def forward(self, input: Tensor) -> Tensor:
        return GroupedConvolution.apply(input, self.weight, self.bias, self.stride, self.padding, self.dilation)


class GroupedMaxPool2d(nn.MaxPool2d):
    """Stands in for a stock `nn.MaxPool2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return GroupedPooling.apply(input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)


class GroupedGroupNorm(nn.GroupNorm):
    """Stands in for a stock `nn.GroupNorm`."""

    def forward(self, input: Tensor) -> Tensor:
        return GroupedNormalisation.apply(input, self.weight, self.bias, self.num_groups, self.eps)


def product_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, in_dims: Dims, clients: int, *options: Sizes
) -> Tensor:
    """The convolution of every client as one matrix product, in autocast's precision if autocast is on."""
    images, kernels = stacked(input, in_dims[0], clients), stacked(weight, in_dims[1], clients)
    shifts = None if bias is None else stacked(bias, in_dims[2], clients)
    if torch.is_autocast_enabled(input.device.type):
        images = images.to(torch.get_autocast_dtype(input.device.type))
    if images.dtype != torch.float64 and kernels_available(images.device):
        from fedlalr.training.kernels.convolution import StackedConvolution  # Triton is not installed everywhere

        return StackedConvolution.apply(images, kernels, shifts, *options)
    output = PatchConvolution.apply(images, kernels.to(images.dtype), *options)
    return output if shifts is None else output + shifts[:, None, :, None, None].to(output.dtype)


def pool(images: Tensor, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, ceil: bool) -> Tensor:
    """Max-pooling of images `[N, channels, h, w]`; a kernel for small windows side by side, channels innermost."""
    window, step, around, hop = (
        (size, size) if isinstance(size, int) else tuple(size) for size in (kernel, stride, padding, dilation)
    )
    tiled = images.dim() == 4 and step == window and around == (0, 0) and hop == (1, 1) and not ceil
    small = prod(window) <= LARGEST_WINDOW and window[0] <= images.shape[-2] and window[1] <= images.shape[-1]
    if tiled and small and images.movedim(1, 3).is_contiguous() and kernels_available(images.device):
        from fedlalr.training.kernels.convolution import StackedPooling  # Triton is not installed everywhere

        return StackedPooling.apply(images, *window)
    return F.max_pool2d(images, kernel, stride, padding, dilation, ceil)


def beside(images: Tensor, client_dim: int | None, clients: int) -> Tensor:
    """Images `[C, B, channels, …]` as `[B, C · channels, …]`, channels innermost in memory."""
    images = stacked(images, client_dim, clients).movedim(0, 1).flatten(1, 2)
    return images.contiguous(memory_format=torch.channels_last if images.dim() == 4 else torch.contiguous_format)


def apart(images: Tensor, clients: int) -> Tensor:
    """The inverse of `beside`, without copying."""
    return images.view(len(images), clients, -1, *images.shape[2:]).movedim(1, 0)


def stacked(tensor: Tensor, client_dim: int | None, clients: int) -> Tensor:
    return tensor.expand(clients, *tensor.shape) if client_dim is None else tensor.movedim(client_dim, 0)


GROUPED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv2d: GroupedConv2d,
    nn.MaxPool2d: GroupedMaxPool2d,
    nn.GroupNorm: GroupedGroupNorm,
}


def grouped_layer(layer: nn.Module) -> type[nn.Module] | None:
    """The class for many clients that stands in for a stock layer; None if there is none."""
    if isinstance(layer, nn.MaxPool2d) and layer.return_indices:
        return None
    if isinstance(layer, nn.Conv2d) and (
        layer.groups > 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    ):
        return None
    return GROUPED.get(type(layer))
