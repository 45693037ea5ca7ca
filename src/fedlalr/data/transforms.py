"""Transforms from raw samples to model inputs: normalisation, and augmentation in training.

A transform is batched, runs on the device of the data and never waits for it. Its randomness is passed in as integers,
so that a client's inputs are a function of (seed, round, client, step) alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final, Protocol

import torch
from torch import Tensor

from fedlalr.common.checks import whole_number

STATISTICS: Final = {
    "cifar10": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion": ((0.2860,), (0.3530,)),
    "digits": ((0.3053,), (0.3760,)),
}
"""Mean and standard deviation of every channel, for pixels in [0, 1], by name of the data set."""


class Transform(Protocol):
    """Turns raw samples into a model's inputs."""

    @property
    def draws(self) -> int:
        """The number of random integers that `train` needs per sample."""

    def train(self, inputs: Tensor, random: Tensor) -> Tensor:
        """Samples `[N, …]` as training sees them; `random` is int64 `[N, draws]`, uniform in [0, 2⁶³)."""

    def test(self, inputs: Tensor) -> Tensor:
        """Samples `[N, …]` as evaluation sees them."""


@dataclass(frozen=True)
class Normalize:
    """(pixel − mean) / std of every channel.

    Images are `[N, channels, height, width]`; bytes are divided by 255 and become float32; floating-point images are
    assumed to lie in [0, 1] and keep their type.

    >>> Normalize(mean=(0.5,), std=(0.25,)).test(torch.tensor([[[[0, 255]]]], dtype=torch.uint8))
    tensor([[[[-2.,  2.]]]])
    """

    mean: Sequence[float]
    std: Sequence[float]

    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            given = getattr(self, name)
            values = (given,) if isinstance(given, int | float) else tuple(float(value) for value in given)
            object.__setattr__(self, name, values)
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"mean and std need one number per channel each, not {len(self.mean)} and {len(self.std)}")
        if not all(0 < s < math.inf for s in self.std):
            raise ValueError(f"std must be finite numbers above 0, not {self.std}")
        if not all(map(math.isfinite, self.mean)):
            raise ValueError(f"mean must be finite numbers, not {self.mean}")

    def train(self, inputs: Tensor, random: Tensor) -> Tensor:
        return self.test(inputs)

    def test(self, inputs: Tensor) -> Tensor:
        _check_images(inputs, len(self.mean))
        return _normalize(inputs, self.mean, self.std)


@dataclass(frozen=True)
class FlipCrop(Normalize):
    """`Normalize`, and in training a random horizontal flip, then zero padding by `pad` and a random crop.

    The normalised image is padded: zeros are the mean colour, not black.
    """

    pad: int = 4

    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("pad", self.pad, least=0)

    def train(self, inputs: Tensor, random: Tensor) -> Tensor:
        _check_images(inputs, len(self.mean))
        height, width = inputs.shape[2:]
        # One integer holds all three choices: its remainders by 2, then 2·pad + 1 twice.
        shifts = 2 * self.pad + 1
        flip = random % 2 == 1
        rows = torch.arange(height, device=inputs.device) + random // 2 % shifts - self.pad
        columns = torch.arange(width, device=inputs.device) + random // (2 * shifts) % shifts - self.pad
        inside = _within(rows, height)[:, None, :, None] & _within(columns, width)[:, None, None, :]
        columns = torch.where(flip, width - 1 - columns, columns)
        # Cropping the raw image and zeroing what lies outside equals padding and cropping the normalised one.
        source = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
        source = source.flatten(1)[:, None].expand(-1, inputs.shape[1], -1)
        pixels = inputs.flatten(2).gather(2, source).view(inputs.shape)
        return torch.where(inside, _normalize(pixels, self.mean, self.std), 0.0)


def _within(places: Tensor, size: int) -> Tensor:
    return (places >= 0) & (places < size)


def _normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    dtype = images.dtype if images.is_floating_point() else torch.float32
    largest = 1.0 if images.is_floating_point() else 255.0
    centre = _per_channel(tuple(largest * m for m in mean), dtype, images.device)
    scale = _per_channel(tuple(1.0 / (largest * s) for s in std), dtype, images.device)
    return (images.to(dtype) - centre) * scale


@cache  # building it copies from the host: once per device, not once per batch
def _per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device).view(-1, 1, 1)


def _check_images(images: Tensor, channels: int) -> None:
    if images.dim() != 4 or images.shape[1] != channels:
        raise ValueError(
            f"images must be [N, {channels}, height, width] for {channels} channel mean(s), not {list(images.shape)}"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise TypeError(f"images must be bytes (torch.uint8) or floating-point numbers in [0, 1], not {images.dtype}")
