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
MOST_PADDING = 4
"""Clients are shuffled together as long as padding takes at most this many times the positions of their samples."""
SMALL_SHUFFLE = 100_000
"""Up to this many positions padding does not matter."""


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
    where = sizes.device if device is None else device
    per_pass = batches_per_pass(sizes, batch_size, drop_last)
    passes = (steps - 1) // per_pass + 1
    used = _used(sizes, batch_size, drop_last)
    table = torch.stack([clients, sizes, steps, per_pass, used, passes])
    by_size = sizes.argsort(stable=True)
    groups = _alike(by_size[passes[by_size].argsort(stable=True)], sizes, passes)
    if len(groups) == 1:
        return _plan_alike(seed, round, table, batch_size, where)
    longest = int(sizes.max())
    width = longest if batch_size is None else min(batch_size, longest)
    whole = torch.full((len(sizes), int(steps.max()), width), PADDING, device=where)
    for rows in groups:
        part = _plan_alike(seed, round, table[:, rows], batch_size, where)
        whole[rows.to(where), : part.shape[1], : part.shape[2]] = part
    return whole


def _alike(rows: Tensor, sizes: Tensor, passes: Tensor) -> list[Tensor]:
    """Groups of clients, each shuffled as one tensor: padded to the most passes and the largest size among them.

    One group, unless that would sort a lot of padding: then halves that are more alike. `rows` are in their order.
    """
    needed = int((sizes[rows] * passes[rows]).sum())
    padded = len(rows) * int(sizes[rows].max()) * int(passes[rows].max())
    if padded <= max(MOST_PADDING * needed, SMALL_SHUFFLE):
        return [rows]
    return [group for half in rows.chunk(2) for group in _alike(half, sizes, passes)]


def _plan_alike(seed: int, round: int, table: Tensor, batch_size: int | None, device: torch.device) -> Tensor:
    """The plan of clients whose shuffles are padded to one shape; `table` has a row for each fact about them."""
    longest, most, passes = (int(table[row].max()) for row in (1, 2, 5))
    width = longest if batch_size is None else min(batch_size, longest)
    clients, sizes, steps, per_pass, used, _ = table.to(device)
    step = torch.arange(most, device=device)
    which_pass = step // per_pass[:, None]  # [C, K]
    place = (step % per_pass[:, None])[:, :, None] * (batch_size or 0) + torch.arange(width, device=device)
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
    used = _used(sizes, batch_size, drop_last)
    place = (step % batches_per_pass(sizes, batch_size, drop_last)[:, None]) * width
    return (used[:, None] - place).clamp(max=width).masked_fill(step >= steps[:, None], 0)


def _used(sizes: Tensor, batch_size: int | None, drop_last: bool) -> Tensor:
    """The number of samples used per pass. A client with less than one batch always keeps its short batch."""
    if batch_size is None or not drop_last:
        return sizes
    return torch.where(sizes >= batch_size, sizes - sizes % batch_size, sizes)


def _shuffles(seed: int, round: int, clients: Tensor, sizes: Tensor, passes: int, longest: int) -> Tensor:
    """Independent permutations of `0 … size − 1` for every client and pass; positions beyond its size come last."""
    device = sizes.device
    sample = torch.arange(longest, device=device)
    which = torch.arange(passes, device=device)[:, None]
    ranks = bits(key(seed, BATCHES, round), clients[:, None, None], which, sample)
    ranks = ranks.masked_fill(sample >= sizes[:, None, None], torch.iinfo(torch.int64).max)
    return ranks.argsort(dim=-1, stable=True)
