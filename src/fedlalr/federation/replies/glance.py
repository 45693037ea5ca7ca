"""Whether it is plain that no reply of a cohort is to be refused: the usual case, at less than half the price.

The rules of `screening.py` need the norm of every change c = u − b, a pass that writes as much as it reads. But the
bound they set is far off, and to see that nobody comes near it a pass that only reads will mostly do:

    |‖u‖ − ‖b‖| ≤ ‖c‖ ≤ ‖u‖ + ‖b‖.

A slot whose change is at hand is measured by that. A cohort that is not plainly sound is not refused for it: all of its
replies are then measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_low

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.replies.reductions import SAFE_NORMS, SUMMED
from fedlalr.training.interfaces import Replies

PRECISE = (torch.float32, torch.float64)
ROUGH = 1e-3
"""Norms are taken in the numbers' own precision here, and trusted to three digits."""


def plainly_sound(
    replies: Replies, broadcast: Slots, table: SlotTable, max_norm_ratio: float | None, changes: Mapping[str, Tensor]
) -> bool:
    """Whether every reply would surely pass. Knows nothing but slots, on the CPU of one process.

    `changes` are those that have been taken: see `small_changes`.
    """
    if max_norm_ratio is None or replies.buffers or replies.kept or not replies.spread.is_whole:
        return False
    ratio = (1 - ROUGH) * max_norm_ratio
    for name, values in replies.slots.items():
        reference, grows = broadcast.get(name), name in table.grows
        change = values if reference is None else changes.get(name)
        seen = values if change is None else change
        if not seen.is_cpu or seen.dtype not in PRECISE or seen.shape[1] > SUMMED or seen.stride(1) != 1:
            return False  # of numbers that lie apart torch adds the squares up less well
        if change is not None:
            sound = _changes_are_sound(change, reference, grows, ratio)
        else:
            sound = _lengths_are_sound(values, broadcast[name], grows, ratio)
        if not sound:
            return False
    return True


def _changes_are_sound(change: Tensor, reference: Tensor | None, grows: bool, ratio: float) -> bool:
    """Of a slot whose change is at hand."""
    if grows and change.amin().item() < 0:
        return False
    norms = _norms(change)
    if _are_within(norms, max(norms), ratio, median_low(norms)):
        return True
    return grows and reference is not None and _are_within(norms, max(norms), ratio, _norm(reference))


def _lengths_are_sound(values: Tensor, reference: Tensor, grows: bool, ratio: float) -> bool:
    """Of any slot that was broadcast, by the inequality above."""
    if reference.stride(0) != 1 or (grows and _is_below(values, reference)):
        return False
    norms, length = _norms(values), _norm(reference)
    longest = max(norms) + length
    scale = length if grows else median_low([abs(norm - length) for norm in norms]) - ROUGH * longest
    return _are_within(norms, longest, ratio, scale)


def _are_within(norms: list[float], longest: float, ratio: float, scale: float) -> bool:
    """Whether norms are finite, as they are of finite numbers alone, and the longest change is within the bound."""
    return SAFE_NORMS[0] < scale < SAFE_NORMS[1] and longest <= ratio * scale and math.isfinite(sum(norms))


def _is_below(values: Tensor, reference: Tensor) -> bool:
    """Whether any number is below the reference. What is not a number is for the norms to find."""
    return (values.amin(0) - reference).amin().item() < 0


def _norms(values: Tensor) -> list[float]:
    norms: list[float] = torch.linalg.vector_norm(values, dim=1).tolist()
    return norms


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))
