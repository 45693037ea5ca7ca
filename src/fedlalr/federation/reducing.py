"""From the cohort's replies to one value per slot.

A slot that went down is reduced as its change from the broadcast: b + Σ wᵢ (uᵢ − b). In exact arithmetic that is the
mean; in floating point it is also exact for a coordinate that nobody touched and never falls below b where no reply
does. The robust reductions of `robust.py` keep both properties.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.robust import REDUCTIONS, SlotReduction, mean_change
from fedlalr.training.work import Buffers

__all__ = ["mean_change", "reduce_buffers", "reduce_slots", "weights"]


def weights(samples: Tensor, weighting: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The share of each reply in a mean, `[R]`, summing to one.

    >>> weights(torch.tensor([1, 3]), "samples", torch.float64, torch.device("cpu"))
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    share = samples.to(torch.float64) if weighting == "samples" else torch.ones(len(samples), dtype=torch.float64)
    return (share / share.sum()).to(dtype).to(device)


def reduce_slots(
    uploads: Slots,
    broadcast: Slots,
    share: Tensor,
    table: SlotTable,
    how: Mapping[str, SlotReduction] | None = None,
) -> Slots:
    """Every uploaded slot `[R, P]` reduced to `[P]`: as `how` says, else as the table does."""
    chosen = {name: REDUCTIONS[default]() for name, default in table.up.items()} | dict(how or {})
    return Slots(**{name: chosen[name].reduce(uploads[name], broadcast.get(name), share) for name in table.up})


def reduce_buffers(stacked: Buffers, broadcast: Mapping[str, Tensor], share: Tensor) -> Buffers:
    """Floating-point buffers averaged as change from the broadcast; integer ones copied from the first client."""
    return {
        name: mean_change(values, broadcast[name], share.to(values.dtype)) if values.is_floating_point() else values[0]
        for name, values in stacked.items()
    }
