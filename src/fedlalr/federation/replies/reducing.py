"""Reduces the cohort's replies to one value per slot.

A slot that was broadcast is reduced as its change from the broadcast: b + Σ wᵢ (uᵢ − b). In exact arithmetic that is
the mean. In floating point it also keeps coordinates that no client changed, and never falls below b if no reply does.
The robust reductions of `reductions.py` have both properties, and so does the mean of buffers, in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.replies.reductions import BUFFERS, REDUCTIONS, Max, Mean, SlotReduction, as_rows, mean_change
from fedlalr.training.interfaces import Buffers, Replies, Tensors, real_numbers
from fedlalr.training.ranks import WHOLE, Spread

Reductions = Mapping[str, SlotReduction]
"""By slot, those that differ from the algorithm's."""
NONE: Mapping[str, Any] = MappingProxyType({})


def weights(samples: Tensor, weighting: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The share of each reply in a mean, `[R]`, summing to one.

    >>> weights(torch.tensor([1, 3]), "samples", torch.float64, torch.device("cpu"))
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    share = samples.to(torch.float64) if weighting == "samples" else torch.ones_like(samples, dtype=torch.float64)
    return (share / share.sum()).to(dtype).to(device)


def reduce_replies(
    replies: Replies, broadcast: Slots, buffers: Tensors, share: Tensor, table: SlotTable, how: Reductions = NONE
) -> tuple[Slots, Buffers]:
    """A cohort's slots and buffers, each reduced to one value, also if their rows are spread over ranks."""
    slots = reduce_slots(replies.slots, broadcast, share, table, how, replies.spread)
    return slots, reduce_buffers(replies.buffers, share, how, buffers, replies.spread)


def reduce_slots(
    uploads: Slots, broadcast: Slots, share: Tensor, table: SlotTable, how: Reductions = NONE, spread: Spread = WHOLE
) -> Slots:
    """Every uploaded slot `[R, P]` reduced to `[P]`, by `how` or, for slots not named there, by the table.

    If the rows are spread over ranks, means and maxima are reduced part by part, all others on the gathered stack.
    """
    sums, maxima, reduced = {}, {}, {}
    for name, default in table.up.items():
        chosen = how.get(name) or REDUCTIONS[default]()
        values, reference = uploads[name], broadcast.get(name)
        if spread.is_whole or type(chosen) not in (Mean, Max):  # a user's subclass may reduce differently
            every = spread.gather(values)
            reduced[name] = _checked(name, chosen.reduce(every, reference, share), every)
        elif type(chosen) is Mean:
            sums[name] = _part_of_mean(values, reference, share, spread)
        else:
            maxima[name] = _highest(values)
    for name, total in spread.ranks.sum(sums).items():
        reduced[name] = broadcast[name] + total if name in broadcast else total
    return Slots(**reduced, **spread.ranks.max(maxima))


def _checked(name: str, value: Tensor, upload: Tensor) -> Tensor:
    """The result of a user's reduction in the slot's precision, checked to have one number per coordinate.

    It shares no memory with the replies: an engine reuses theirs, and a reduction may return a reply.
    """
    if not isinstance(value, Tensor) or value.shape != upload.shape[1:]:
        given = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"the reduction of {name} must return a tensor {tuple(upload.shape[1:])}, not {given}")
    value = value.to(upload.dtype)
    shared = value.untyped_storage().data_ptr() == upload.untyped_storage().data_ptr()
    return value.clone() if shared else value


def reduce_buffers(
    stacked: Buffers, share: Tensor, how: Reductions = NONE, broadcast: Tensors = NONE, spread: Spread = WHOLE
) -> Buffers:
    """Floating-point and complex buffers reduced by `how`, by default to their mean; integers to their median.

    For a number that never changes, the median is the value most clients have; a count is not moved far by one client.
    """
    reduced: Buffers = {}
    chosen = how.get(BUFFERS, Mean())
    share = share.double() / share.double().sum()  # the slots' rounded weights would shift large numbers
    for dtype in dict.fromkeys(values.dtype for values in stacked.values()):  # once for all of a dtype
        alike = {name: values for name, values in stacked.items() if values.dtype == dtype}
        flat = torch.cat([as_rows(real_numbers(values)) for values in alike.values()], 1)
        if not flat.is_floating_point():
            row = _middle(spread.gather(flat))
        elif type(chosen) is Mean:
            row = _mean(flat, share, spread)
        else:
            known = [broadcast.get(name, values.new_zeros(values.shape[1:])) for name, values in alike.items()]
            reference = torch.cat([real_numbers(each).flatten() for each in known])
            row = _reduce_floats(spread.gather(flat), reference, share, chosen)
        row = torch.view_as_complex(row.view(-1, 2)) if dtype.is_complex else row
        parts = torch.split(row, [values.shape[1:].numel() for values in alike.values()])
        reduced |= {name: part.view(alike[name].shape[1:]) for name, part in zip(alike, parts, strict=True)}
    return {name: reduced[name] for name in stacked}


def _mean(values: Tensor, share: Tensor, spread: Spread) -> Tensor:
    """A mean clamped to the replies' range, so that equal replies are kept as they are.

    It is not computed as a change from the broadcast: if statistics have shrunk a lot since the last round, rounding
    could make a variance negative.
    """
    mean = spread.ranks.sum({"mean": _part_of_mean(values, None, share, spread)})["mean"]
    least, most = torch.aminmax(values, dim=0) if len(values) else (torch.full_like(mean, torch.inf), _highest(values))
    ends = spread.ranks.max({"least": -least, "most": most})
    return torch.clamp(mean, -ends["least"], ends["most"])


def _reduce_floats(values: Tensor, reference: Tensor, share: Tensor, how: SlotReduction) -> Tensor:
    """A reduction like that of a slot, clamped to the replies' range; a value that all replies share is kept, even if
    it is infinite."""
    least, most = torch.aminmax(values, dim=0)
    start = torch.nan_to_num(reference, nan=0.0, posinf=0.0, neginf=0.0)
    reduced = _checked(BUFFERS, how.reduce(values, start, share.to(values.dtype)), values)
    return torch.where(least == most, least, torch.clamp(reduced, least, most))


def _middle(values: Tensor) -> Tensor:
    """The lower median of each number over the replies."""
    return values.sort(0).values[(len(values) - 1) // 2].clone()


def _part_of_mean(values: Tensor, reference: Tensor | None, share: Tensor, spread: Spread) -> Tensor:
    """What the rows on this rank contribute to the mean."""
    return mean_change(values if reference is None else values - reference, None, spread.mine(share).to(values.dtype))


def _highest(values: Tensor) -> Tensor:
    """The largest value of each coordinate over the rows on this rank, of which there may be none."""
    return values.amax(0) if len(values) else values.new_full(values.shape[1:], -torch.inf)
