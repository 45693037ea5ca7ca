"""Converts between a module's named parameters and the flat vector that algorithms work on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import torch
from torch import Tensor, nn


def flat_dtype(parameters: Iterable[Tensor]) -> torch.dtype:
    """The dtype of the flat vector and of every moment: float64 if a parameter has it, else float32, never half."""
    return torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a module, in order, and the position of each in the flat vector.

    >>> layout = Layout.of(nn.Linear(2, 3))
    >>> layout.names, layout.size
    (('weight', 'bias'), 9)
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """The layout of a module; parameters that do not require a gradient are left out."""
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trainable:
            raise ValueError(
                "the model has no parameter with requires_grad=True, so there is nothing to train; "
                "unfreeze some of its parameters first"
            )
        for name, parameter in trainable.items():
            if not parameter.is_floating_point():
                raise TypeError(
                    f"parameter {name!r} is {parameter.dtype}; only real floating-point parameters are trained"
                )
        return cls(tuple(trainable), tuple(p.shape for p in trainable.values()), flat_dtype(trainable.values()))

    @property
    def size(self) -> int:
        """P, the number of trainable parameters."""
        return sum(prod(shape) for shape in self.shapes)

    def mask(self, names: Collection[str], device: torch.device) -> Tensor:
        """1 at the parameters with these names, 0 elsewhere, as a flat vector."""
        sizes = torch.tensor([prod(shape) for shape in self.shapes], device=device)
        ones = torch.tensor([name in names for name in self.names], device=device, dtype=self.dtype)
        return ones.repeat_interleave(sizes)

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """The flat vector of named tensors, as a copy."""
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.names])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The parameters in a flat vector `[…, P]` by name, as views in their shapes."""
        lead = flat.shape[:-1]
        parts = torch.split(flat, [prod(shape) for shape in self.shapes], dim=-1)
        return {
            name: part.view((*lead, *shape)) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def block_means(self, flat: Tensor) -> Tensor:
        """A vector `[…, P]` with every number replaced by the mean of its parameter."""
        parts = torch.split(flat, [prod(shape) for shape in self.shapes], dim=-1)
        return torch.cat([part.mean(-1, keepdim=True).expand(part.shape) for part in parts], dim=-1)

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Write a flat vector into a module's parameters."""
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in self.views(flat).items():
                parameters[name].copy_(value)


@dataclass(frozen=True)
class Division:
    """A flat vector cut in two: the coordinates that clients share, and the personal ones that stay with each client.

    >>> division = Division.of(Layout.of(nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))), ("1.weight", "1.bias"))
    >>> division.personal.names, division.shared.size
    (('1.weight', '1.bias'), 4)
    """

    shared: Layout
    personal: Layout
    lengths: tuple[tuple[bool, int], ...]
    """The vector from start to end: whether a piece is personal, and its length."""

    @classmethod
    def of(cls, layout: Layout, names: Collection[str]) -> Division:
        """Cut a layout by the names of the personal parameters; rejects names that leave nothing to share."""
        own = [name in names for name in layout.names]
        if all(own):
            raise ValueError(
                f"personal covers every trainable parameter, so the clients would share nothing; leave out those that "
                f"they train together, such as {layout.names[0]!r}"
            )
        marked = list(zip(own, layout.shapes, strict=True))
        lengths = [(mine, sum(prod(shape) for _, shape in run)) for mine, run in groupby(marked, lambda each: each[0])]
        return cls(_chosen(layout, own, False), _chosen(layout, own, True), tuple(lengths))

    def cut(self, flat: Tensor, *, personal: bool) -> Tensor:
        """The personal or the shared coordinates of a vector or stack `[…, P]`."""
        parts = torch.split(flat, [length for _, length in self.lengths], dim=-1)
        return torch.cat([part for part, (mine, _) in zip(parts, self.lengths, strict=True) if mine == personal], -1)

    def join(self, shared: Tensor, personal: Tensor) -> Tensor:
        """The inverse of `cut`. Either part may be a vector that goes with every row of the other."""
        lead = (shared if shared.dim() > personal.dim() else personal).shape[:-1]
        rest = []
        for kind, part in enumerate((shared, personal)):
            lengths = [length for mine, length in self.lengths if mine == kind]
            rest.append(iter(torch.split(part.expand(*lead, -1), lengths, dim=-1)))
        return torch.cat([next(rest[mine]) for mine, _ in self.lengths], -1)


def _chosen(layout: Layout, own: Sequence[bool], wanted: bool) -> Layout:
    kept = [place for place, mine in enumerate(own) if mine == wanted]
    return Layout(tuple(layout.names[i] for i in kept), tuple(layout.shapes[i] for i in kept), layout.dtype)
