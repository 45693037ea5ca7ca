"""Which samples a client sees in which local step: a function of (seed, round, client) alone.

A client iterates over its samples in shuffled passes, reshuffled every round. Each pass is cut into batches; the last
one may be smaller. A round of K steps uses the first K batches of consecutive passes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedlalr.data.random import BATCHES, bits, key

PADDING = -1
"""Marks positions of a batch plan without a sample."""


def batches_per_pass(sizes: Tensor, batch_size: int | None, drop_last: bool = False) -> Tensor:
    """The number of batches in one pass over a client's samples.

    >>> batches_per_pass(torch.tensor([7, 3]), 3), batches_per_pass(torch.tensor([7, 3]), 3, drop_last=True)
    (tensor([3, 1]), tensor([2, 1]))
    """
    if batch_size is None:
        return torch.ones_like(sizes)
    return (_used(sizes, batch_size, drop_last) + batch_size - 1) // batch_size


def plan(
    seed: int,
    round: int,
    clients: Tensor,
    sizes: Tensor,
    steps: Tensor,
    batch_size: int | None,
    drop_last: bool = False,
    device: torch.device | None = None,
) -> Tensor:
    """The positions, within each client's own samples, of every local batch: `[C, K, B]`, padded with `PADDING`.

    `clients`, `sizes` and `steps` are int64 `[C]`: id, number of samples and number of local steps of each. A client's
    row does not depend on the other clients in the call. The plan is computed on `device`, by default the device of
    `sizes`, with the same result on every device; if `sizes` is on the CPU, nothing waits for the device.
    """
    longest, most = int(sizes.max()), int(steps.max())
    width = longest if batch_size is None else min(batch_size, longest)
    per_pass = batches_per_pass(sizes, batch_size, drop_last)
    passes = int(((steps - 1) // per_pass).max()) + 1 if most else 0
    used = sizes if batch_size is None else _used(sizes, batch_size, drop_last)
    clients, sizes, steps, per_pass, used = torch.stack([clients, sizes, steps, per_pass, used]).to(
        sizes.device if device is None else device
    )
    step = torch.arange(most, device=sizes.device)
    which_pass = step // per_pass[:, None]  # [C, K]
    place = (step % per_pass[:, None])[:, :, None] * (batch_size or 0) + torch.arange(width, device=sizes.device)
    valid = (place < used[:, None, None]) & (step < steps[:, None])[:, :, None]
    order = _shuffles(seed, round, clients, sizes, passes, longest)  # [C, passes, longest]
    place = which_pass.clamp(max=max(passes - 1, 0))[:, :, None] * longest + place.clamp(max=longest - 1)
    picked = order.flatten(1).gather(1, place.flatten(1)).view(place.shape)
    return picked.masked_fill(~valid, PADDING)


def batch_counts(sizes: Tensor, steps: Tensor, batch_size: int | None, drop_last: bool = False) -> Tensor:
    """The number of samples in every batch of a plan, `[C, K]`; 0 after a client's last step.

    >>> batch_counts(torch.tensor([7, 3]), torch.tensor([4, 1]), 3)
    tensor([[3, 3, 1, 3],
            [3, 0, 0, 0]])
    """
    step = torch.arange(int(steps.max()), device=sizes.device)
    width = int(sizes.max()) if batch_size is None else batch_size
    used = sizes if batch_size is None else _used(sizes, batch_size, drop_last)
    place = (step % batches_per_pass(sizes, batch_size, drop_last)[:, None]) * width
    return (used[:, None] - place).clamp(max=width).masked_fill(step >= steps[:, None], 0)


def _used(sizes: Tensor, batch_size: int, drop_last: bool) -> Tensor:
    """The number of samples used per pass. A client with less than one batch always keeps its short batch."""
    return torch.where(sizes >= batch_size, sizes - sizes % batch_size, sizes) if drop_last else sizes


def _shuffles(seed: int, round: int, clients: Tensor, sizes: Tensor, passes: int, longest: int) -> Tensor:
    """Independent permutations of `0 … size − 1` for every client and pass; positions beyond its size come last."""
    device = sizes.device
    sample = torch.arange(longest, device=device)
    ranks = bits(
        key(seed, BATCHES, round), clients[:, None, None], torch.arange(passes, device=device)[None, :, None], sample
    )
    ranks = ranks.masked_fill(sample >= sizes[:, None, None], torch.iinfo(torch.int64).max)
    return ranks.argsort(dim=-1, stable=True)
