"""BatchNorm over the real samples of a padded batch.

A stack of clients whose batches differ in length is padded to one length. torch's BatchNorm would include the padding
in its statistics; this one weights it with zero and gives what torch's layer gives on the unpadded batch, including the
running statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedlalr.training.torch_internals import BatchNorm

STARTS = {"running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}
"""The initial values of BatchNorm's running statistics."""


class MaskedBatchNorm(BatchNorm):
    """Stands in for a stock layer, together with that layer's class. Without a mask it behaves like that layer."""

    mask: Tensor | None = None
    """Which samples of the batch are real, bool `[B]`; None if all are."""
    over_samples_alone: bool = False
    """Whether an input without further dimensions was seen; torch's layer rejects a batch of one such sample."""
    averaging: bool = False
    """Whether the running statistics are the mean over all inputs, whatever the momentum."""
    averaged: int = 0
    """The number of inputs averaged so far; a module may call a layer more than once per batch."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None):
            return super().forward(input)
        if self.averaging:
            self.averaged += 1
            self.momentum = 1 / self.averaged
        places = input[0, 0].numel()
        self.over_samples_alone |= places == 1
        cumulative = self.training and self.track_running_stats and self.momentum is None
        # on a CPU torch's gradient of a single channels-last sample is wrong
        if self.mask is None and not cumulative and len(input) > 1:
            return super().forward(input)
        self._check_input_dim(input)
        if places == len(input) == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        mask = input.new_ones(len(input), dtype=torch.bool) if self.mask is None else self.mask
        return self._normalise(input, mask.view(-1, *[1] * (input.dim() - 1)), places)

    def _normalise(self, input: Tensor, mask: Tensor, places: int) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)  # statistics are never in half precision
        x, weight = input.to(wide), mask.to(wide)
        over = (0, *range(2, input.dim()))
        count = weight.sum().clamp(min=1) * places
        mean = (x * weight).sum(over) / count
        centred = x - self._across(mean, x)
        variance = (centred.square() * weight).sum(over) / count
        if self.training and self.track_running_stats:
            self._remember(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        out = centred * self._across((variance + self.eps).rsqrt(), x)
        if self.weight is not None:
            out = out * self._across(self.weight.to(wide), x) + self._across(self.bias.to(wide), x)
        return out.to(input.dtype)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = 1 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.copy_((1 - momentum) * running + momentum * new)

    @staticmethod
    def _across(channels: Tensor, like: Tensor) -> Tensor:
        return channels.view(1, -1, *[1] * (like.dim() - 2))


MASKED: dict[type[nn.Module], type[nn.Module]] = {
    stock: type(f"Masked{stock.__name__}", (MaskedBatchNorm, stock), {})
    for stock in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}
"""A stock layer → what stands in for it. A subclass may change anything, so none stands in for it."""


def masked_norm(layer: nn.Module) -> type[nn.Module] | None:
    """The class that stands in for a stock BatchNorm; None for other layers."""
    return MASKED.get(type(layer))


@contextmanager
def masked(layers: list[MaskedBatchNorm], mask: Tensor | None) -> Iterator[None]:
    """Tell the layers which samples are real during a forward pass."""
    for layer in layers:
        layer.mask = mask
    try:
        yield
    finally:
        for layer in layers:
            layer.mask = None
