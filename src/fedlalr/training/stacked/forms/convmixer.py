"""ConvMixer over a stack of clients, on maps laid out as `[C, D, B, H, W]`.

In that layout a 1×1 convolution is one batched matrix product, and everything that a BatchNorm channel averages over is
contiguous in memory. GroupNorm works on the same maps.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlalr.models.convmixer import ConvMixer
from fedlalr.training.interfaces import Buffers, Tensors
from fedlalr.training.kernels import plain, precision_fits
from fedlalr.training.kernels.plain import GroupNorm, Norm, Normed
from fedlalr.training.stacked.masked_norm import STARTS
from fedlalr.training.torch_internals import add_to_each


class ConvMixerForm:
    """A `StackedForward` of `ConvMixer`."""

    def __init__(self, module: Any, compute: torch.dtype | None) -> None:
        """Of a module that `fits`."""
        self.patch = module.patches.kernel_size[0]
        self.depth = len(module.blocks)
        self.norms = {name: layer for name, layer in module.named_modules() if name.endswith("norm")}
        self.compute = compute

    @staticmethod
    def fits(module: nn.Module, compute: torch.dtype | None, sample: torch.Size) -> bool:
        """Whether the module is a ConvMixer of stock layers whose maps the kernels, if requested, support."""
        if type(module) is not ConvMixer or len(sample) != 3 or not precision_fits(module, compute):
            return False
        norms = [layer for name, layer in module.named_modules() if name.endswith("norm")]
        if not all(_is_plain(layer) for layer in norms) or not _is_stock(module):
            return False
        if compute is None:
            return True
        from fedlalr.training.kernels.maps import groups_supported, supported

        groups = {layer.num_channels // layer.num_groups for layer in norms if isinstance(layer, nn.GroupNorm)}
        patch = module.patches.kernel_size[0]
        kernel = module.get_parameter("blocks.0.depthwise.weight").shape[-1]
        return supported(sample[1] // patch, sample[2] // patch, kernel) and all(map(groups_supported, groups))

    def __call__(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Buffers]:
        with torch.autocast(inputs.device.type, enabled=False):  # the operations choose their own precision
            stack = _Stack(self, parameters, buffers, mask)
            return self._forward(stack, inputs), stack.new_buffers()

    @torch.no_grad()
    def evaluate(self, parameters: Tensors, buffers: Tensors, inputs: Tensor) -> Tensor:
        """Logits `[C, B, classes]` in evaluation mode."""
        with torch.autocast(inputs.device.type, enabled=False):
            return self._forward(_Stack(self, parameters, buffers, mask=None, frozen=True), inputs)

    def fresh_statistics(self) -> dict[str, float]:
        """The buffers that hold running statistics, by name, with their initial values."""
        batch_norms = [name for name, layer in self.norms.items() if isinstance(layer, nn.BatchNorm2d)]
        return {f"{name}.{kind}": start for name in batch_norms for kind, start in STARTS.items()}

    @torch.no_grad()
    def statistics(
        self, parameters: Tensors, buffers: Buffers, inputs: Tensor, mask: Tensor | None, seen: int
    ) -> Buffers:
        """The running statistics of one network, averaged over each client's batch and the `seen` ones before it."""
        shared = {name: value.expand(len(inputs), *value.shape) for name, value in parameters.items()}
        with torch.autocast(inputs.device.type, enabled=False):
            stack = _Stack(self, shared, buffers, mask, share=1 / (seen + 1))
            self._forward(stack, inputs)
            return stack.new_buffers()

    def _forward(self, stack: _Stack, inputs: Tensor) -> Tensor:
        parameters = stack.parameters
        x = stack.gelu_norm("patches", self._patches(parameters["patches.weight"], inputs), pooled=False)
        for block in range(self.depth):
            x = stack.depthwise(f"blocks.{block}.depthwise", x)
            y = stack.operations.pointwise(parameters[f"blocks.{block}.pointwise.weight"].flatten(2), x)
            x = stack.gelu_norm(f"blocks.{block}.pointwise", y, pooled=block == self.depth - 1)
        weight, bias = parameters["head.weight"], parameters["head.bias"]
        return torch.baddbmm(bias[:, None, :], x.transpose(1, 2), weight.transpose(1, 2))

    def _patches(self, weight: Tensor, images: Tensor) -> Tensor:
        """The patch convolution as a matrix product: every patch is a column."""
        clients, batch, channels, height, width = images.shape
        p, rows, columns = self.patch, height // self.patch, width // self.patch
        tiles = images[..., : rows * p, : columns * p].reshape(clients, batch, channels, rows, p, columns, p)
        tiles = tiles.to(self.compute or weight.dtype).permute(0, 2, 4, 6, 1, 3, 5).flatten(1, 3)
        weight = weight.flatten(2)
        if self.compute is not None:  # multiples of eight keep the products on the tensor cores
            extra = -tiles.shape[1] % 8
            tiles, weight = F.pad(tiles, (0,) * 7 + (extra,)), F.pad(weight, (0, extra))
        return operations(self.compute).pointwise(weight, tiles)


class _Stack:
    """One forward pass: looks up parameters by name and collects the new running statistics."""

    def __init__(
        self,
        form: ConvMixerForm,
        parameters: Tensors,
        buffers: Tensors,
        mask: Tensor | None,
        frozen: bool = False,
        share: float | None = None,
    ) -> None:
        """`share` is the weight of this batch in the running statistics, instead of each layer's momentum."""
        self.form, self.parameters, self.buffers, self.mask = form, parameters, buffers, mask
        self.frozen, self.share = frozen, share
        self.operations = operations(form.compute)
        self._changed: dict[str, Tensor] = {}

    def gelu_norm(self, layer: str, y: Tensor, pooled: bool) -> Tensor:
        bias, norm = self.parameters[f"{layer}.bias"], self._norm(layer)
        return self._remembered(layer, self.operations.gelu_norm(y, bias, norm, self.mask, pooled))

    def depthwise(self, layer: str, x: Tensor) -> Tensor:
        taps, bias, norm = self.parameters[f"{layer}.weight"], self.parameters[f"{layer}.bias"], self._norm(layer)
        return self._remembered(layer, self.operations.depthwise_gelu_norm(x, taps, bias, norm, self.mask))

    def new_buffers(self) -> dict[str, Tensor]:
        counters = [
            f"{name}.num_batches_tracked" for name in self.form.norms if f"{name}.running_mean" in self._changed
        ]
        counts = add_to_each([self.buffers[name] for name in counters], 1)
        return {**self.buffers, **self._changed, **dict(zip(counters, counts, strict=True))}

    def _norm(self, layer: str) -> Norm | GroupNorm:
        name = f"{layer}_norm"
        stock: Any = self.form.norms[name]
        weight, bias = self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
        if isinstance(stock, nn.GroupNorm):
            return GroupNorm(weight, bias, stock.num_groups, stock.eps)
        mean, variance = self.buffers[f"{name}.running_mean"], self.buffers[f"{name}.running_var"]
        momentum = stock.momentum if self.share is None else self.share
        return Norm(weight, bias, mean, variance, momentum, stock.eps, self.frozen)

    def _remembered(self, layer: str, normed: Normed) -> Tensor:
        """The output of a layer; its new running statistics, if it has any, are kept."""
        for name in ("running_mean", "running_var"):
            if (running := getattr(normed, name)) is not None:
                self._changed[f"{layer}_norm.{name}"] = running
        return normed.output


def operations(compute: torch.dtype | None) -> ModuleType:
    """The operations on maps: plain PyTorch, or the kernels for bfloat16."""
    if compute is None:
        return plain
    from fedlalr.training.kernels import maps  # Triton is not installed everywhere

    return maps


def _is_stock(module: ConvMixer) -> bool:
    """Whether all layers except the norms are ConvMixer's own: a caller may have replaced some."""
    try:
        kernel = module.get_parameter("blocks.0.depthwise.weight").shape[-1]
        head, patches, depth = module.head, module.patches, len(module.blocks)
        with torch.device("meta"):
            stock = ConvMixer(
                head.out_features, head.in_features, depth, kernel, patches.kernel_size[0], channels=patches.in_channels
            )
    except (AttributeError, TypeError, ValueError):  # a layer of another kind, or an even kernel
        return False
    return _description(module) == _description(stock)


def _description(module: ConvMixer) -> list[object]:
    """The layers except the norms, with their options, and the names of all parameters."""
    layers = [(name, type(layer), layer.extra_repr()) for name, layer in module.named_modules() if "norm" not in name]
    return [layers, *(name for name, _ in module.named_parameters())]


def _is_plain(layer: nn.Module) -> bool:
    """Whether a norm is torch's own, of a kind and with options that the forms support."""
    if type(layer) is nn.GroupNorm:
        return layer.affine
    return type(layer) is nn.BatchNorm2d and layer.affine and layer.track_running_stats and layer.momentum is not None
