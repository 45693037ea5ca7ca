"""ConvMixer, the paper's kind of network for CIFAR (Trockman, Kolter. "Patches Are All You Need?", TMLR 2023).

    patches   x ← norm(gelu(conv(x)))                  patch × patch, stride patch, to `dim` channels
    depth ×   x ← x + norm(gelu(depthwise(x)))         kernel × kernel, size kept
              x ← norm(gelu(pointwise(x)))             1 × 1
    head      linear(mean of x over all positions)

`norm` is BatchNorm as there, or GroupNorm, which has no running statistics that clients must agree on. Both have the
same parameters.

GroupNorm always works under `torch.func.vmap` over clients. BatchNorm in training mode works only if the buffers are
stacked like the parameters, since every client updates its own. BatchNorm includes every sample of its batch, padding
too.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor, nn

from fedlalr.common.checks import check_choice, check_sizes

Norm = Literal["batch", "group"]


class MixerBlock(nn.Module):
    """A depthwise convolution with a residual connection mixes positions, then a 1 × 1 convolution mixes channels."""

    def __init__(self, dim: int, kernel: int, norm: Norm) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.depthwise_norm = make_norm(norm, dim)
        self.pointwise = nn.Conv2d(dim, dim, 1)
        self.pointwise_norm = make_norm(norm, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.depthwise_norm(nn.functional.gelu(self.depthwise(x)))
        return self.pointwise_norm(nn.functional.gelu(self.pointwise(x)))


class ConvMixer(nn.Module):
    """594,186 parameters for 10 classes, 617,316 for 100. The paper states depth, kernel and patch; the width is ours.

    >>> sum(p.numel() for p in ConvMixer(classes=100).parameters())
    617316
    """

    def __init__(
        self,
        classes: int = 10,
        dim: int = 256,
        depth: int = 8,
        kernel: int = 5,
        patch: int = 2,
        norm: Norm = "batch",
        channels: int = 3,
    ) -> None:
        super().__init__()
        check_sizes("ConvMixer", classes=classes, dim=dim, depth=depth, kernel=kernel, patch=patch, channels=channels)
        if kernel % 2 == 0:
            raise ValueError(f"ConvMixer: kernel must be odd, so that a block keeps the image's size, not {kernel}")
        check_choice("ConvMixer: norm", norm, ("batch", "group"))
        self.patches = nn.Conv2d(channels, dim, patch, stride=patch)
        self.patches_norm = make_norm(norm, dim)
        self.blocks = nn.Sequential(*(MixerBlock(dim, kernel, norm) for _ in range(depth)))
        self.head = nn.Linear(dim, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[N, classes]` of images `[N, channels, height, width]`."""
        x = self.patches_norm(nn.functional.gelu(self.patches(images)))
        x = self.blocks(x)
        return self.head(x.mean(dim=(2, 3)))


def make_norm(norm: Norm, dim: int) -> nn.Module:
    """BatchNorm, or GroupNorm with eight channels per group (more if eight is not a divisor): 32 groups of 256.

    With one channel per group the network could not learn: the mean over positions is zero by definition, and the head
    sees nothing but these means.
    """
    return nn.BatchNorm2d(dim) if norm == "batch" else nn.GroupNorm(math.gcd(dim, max(1, dim // 8)), dim)
