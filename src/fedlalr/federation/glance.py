"""Whether it is plain that no reply of a cohort is to be refused: the usual case, at less than half the price.

The rules of `screening.py` need the norm of every change c = u − b, a pass that writes as much as it reads. But the
bound they set is far off, and to see that nobody comes near it a pass that only reads will mostly do:

    |‖u‖ − ‖b‖| ≤ ‖c‖ ≤ ‖u‖ + ‖b‖.

A stack that fits into a processor's cache, or that holds changes already, is measured as it is. A cohort that is not
plainly sound is not refused for that: all of it is then measured.
"""

from __future__ import annotations

import math
from statistics import median_low

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.robust import NUMBERS_IN_CACHE, SAFE_NORMS, SUMMED
from fedlalr.training.work import Replies

PRECISE = (torch.float32, torch.float64)
ROUGH = 1e-3
"""Norms are taken in the numbers' own precision here, and trusted to three digits."""


def plainly_sound(replies: Replies, broadcast: Slots, table: SlotTable, max_norm_ratio: float | None) -> bool:
    """Whether every reply would surely pass. Knows nothing but slots, on the CPU of one process."""
    if max_norm_ratio is None or replies.buffers or replies.kept or not replies.spread.is_whole:
        return False
    ratio = (1 - ROUGH) * max_norm_ratio
    for name, values in replies.slots.items():
        if not values.is_cpu or values.dtype not in PRECISE or values.shape[1] > SUMMED:
            return False
        reference, grows = broadcast.get(name), name in table.grows
        if values.stride(1) != 1 or (reference is not None and reference.stride(0) != 1):
            return False  # of numbers that lie apart torch adds the squares up less well
        if reference is None or values.numel() <= NUMBERS_IN_CACHE:
            sound = _changes_are_sound(values, reference, grows, ratio)
        else:
            sound = _lengths_are_sound(values, reference, grows, ratio)
        if not sound:
            return False
    return True


def _changes_are_sound(values: Tensor, reference: Tensor | None, grows: bool, ratio: float) -> bool:
    """Of a slot that is itself a change, or so small that its change costs nothing."""
    change = values if reference is None else values - reference
    if grows and change.amin().item() < 0:
        return False
    norms = _norms(change)
    if _are_within(norms, ratio, median_low(norms)):
        return True
    return grows and reference is not None and _are_within(norms, ratio, _norm(reference))


def _lengths_are_sound(values: Tensor, reference: Tensor, grows: bool, ratio: float) -> bool:
    """Of any slot that was broadcast, by the inequality above."""
    if grows and _is_below(values, reference):
        return False
    norms, length = _norms(values), _norm(reference)
    longest = [norm + length for norm in norms]
    scale = length if grows else median_low(abs(norm - length) for norm in norms) - ROUGH * max(longest)
    return _are_within(longest, ratio, scale)


def _are_within(norms: list[float], ratio: float, scale: float) -> bool:
    """Whether norms are finite, as they are of finite numbers alone, and at most so many times a scale."""
    return SAFE_NORMS[0] < scale < SAFE_NORMS[1] and max(norms) <= ratio * scale and math.isfinite(sum(norms))


def _is_below(values: Tensor, reference: Tensor) -> bool:
    """Whether any number is below the reference. NumPy compares several times as fast as torch does."""
    rows, base = values.numpy(force=True), reference.numpy(force=True)
    return any((row < base).any() for row in rows)


def _norms(values: Tensor) -> list[float]:
    norms: list[float] = torch.linalg.vector_norm(values, dim=1).tolist()
    return norms


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))
