"""The gradient of a flat stack of parameters, into which a layer can write its own part.

Autograd returns the gradient of each parameter in memory of its own, and assembling them reads and writes all of them
once more. Where one layer has most of the parameters, its product writes into the assembled gradient instead.
"""

from __future__ import annotations

from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedlalr.training.layout import Layout


class FlatGradient:
    """Memory for the gradient of a contiguous stack `[C, P]`, known to the layers while the network runs forward."""

    current: ClassVar[FlatGradient | None] = None

    def __init__(self, layout: Layout, flat: Tensor) -> None:
        self.layout, self.flat, self.memory = layout, flat, torch.empty_like(flat)
        self._given: set[int] = set()

    @staticmethod
    def pays(layout: Layout) -> bool:
        """Whether one parameter has most of the numbers: with many of similar size, one copy of all is as fast."""
        return 2 * max(map(prod, layout.shapes)) > layout.size

    def __enter__(self) -> dict[str, Tensor]:
        """The parameters by name, as views of the stack."""
        FlatGradient.current = self
        return dict(zip(self.layout.names, _Parameters.apply(self.flat, self.layout, self.memory), strict=True))

    def __exit__(self, *_: object) -> None:
        FlatGradient.current = None

    @staticmethod
    def place_of(parameter: Tensor) -> Tensor | None:
        """Where the gradient of a part of the stack belongs.

        None for other tensors, and from the second call on: a parameter that is used twice has the sum of two
        gradients.
        """
        mine = FlatGradient.current
        if mine is None or parameter.untyped_storage().data_ptr() != mine.flat.untyped_storage().data_ptr():
            return None
        start = int(parameter.storage_offset() - mine.flat.storage_offset())
        if start in mine._given:
            return None
        mine._given.add(start)
        return mine.memory.as_strided(parameter.shape, parameter.stride(), start)


class _Parameters(torch.autograd.Function):
    """The parameters in a flat stack, as views; their gradients are assembled in the given memory."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, layout: Layout, memory: Tensor) -> tuple[Tensor, ...]:
        ctx.layout, ctx.memory = layout, memory
        return tuple(layout.views(flat).values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        elsewhere = [
            (place, slope)
            for place, slope in zip(ctx.layout.views(ctx.memory).values(), slopes, strict=True)
            if slope.data_ptr() != place.data_ptr()
        ]
        if len(elsewhere) == len(slopes):
            return torch.cat([slope.flatten(1) for slope in slopes], dim=1), None, None
        for place, slope in elsewhere:
            place.copy_(slope)
        return ctx.memory, None, None
