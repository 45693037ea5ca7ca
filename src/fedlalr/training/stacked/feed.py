"""The batches of a stack of clients: which samples, in which local step, padded to one shape.

Clients are sorted by their number of local steps, the longest first, so that those still training are always the first
rows of the stack and nothing is computed for the others. The whole round is planned before its first step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedlalr.data.batches import PADDING, batch_counts, plan
from fedlalr.data.population import DatasetClients, Population
from fedlalr.data.trees import map_tree, reshaped, rows
from fedlalr.training.interfaces import Training
from fedlalr.training.stacked.gradient import Batch

LARGE_PLAN = 100_000
"""Plans with at least this many entries are made on the data's device, not on the CPU; the numbers are the same."""


class Shape(NamedTuple):
    """How one local step of a stack is laid out."""

    active: int
    """Clients still training: the first rows."""
    width: int
    """Samples in the longest batch."""
    padded: bool
    """Whether some client's batch is shorter."""


class Feed:
    """The whole round's batches for a stack of clients."""

    def __init__(self, training: Training, round: int, clients: Tensor) -> None:
        self.training, self.round, self._given = training, round, clients
        steps = training.steps(round, clients)
        self.order = steps.argsort(descending=True, stable=True)
        """The rows of the caller's clients, in the order of the stack."""
        self.clients, self.steps = clients[self.order], steps[self.order]
        self._sizes = training.clients.sizes[self.clients]
        self.counts = batch_counts(self._sizes, self.steps, training.step_size, training.drop_last).T
        """Real samples of every batch, `[K, C]`."""
        self.is_small = self.counts.numel() * int(self._sizes.max()) < LARGE_PLAN

    @cached_property
    def steps_there(self) -> Tensor:
        """K of every client on the device."""
        return self.steps.to(self.training.device)

    @cached_property
    def positions(self) -> Tensor:
        """Places in each client's own samples, `[K, C, B]`, −1 for padding."""
        training = self.training
        device = None if self.is_small or not isinstance(training.clients, Population) else training.device
        size, drop_last = training.step_size, training.drop_last
        positions = plan(training.seed, self.round, self.clients, self._sizes, self.steps, size, drop_last, device)
        return positions.transpose(0, 1).contiguous()

    def is_for(self, round: int, clients: Tensor) -> bool:
        """Whether these are the batches of some clients in a round."""
        return self.round == round and torch.equal(self._given, clients)

    def shapes(self, first: int = 0, last: int | None = None) -> list[Shape]:
        """The layout of every local step of the clients in some rows, as long as any of them trains."""
        steps = self.steps[first:last]
        counts = self.counts[: int(steps[0]), first:last]
        training_now = steps > torch.arange(len(counts), device="cpu")[:, None]  # [K, C]
        active = training_now.sum(1).tolist()
        most = counts.amax(1).tolist()
        least = counts.masked_fill(~training_now, torch.iinfo(torch.int64).max).amin(1).tolist()
        return [Shape(a, high, low < high) for a, high, low in zip(active, most, least, strict=True)]

    def tables(self, width: int = 0) -> Tables | None:
        """The indices to gather in every step, at least `width` wide, for clients that share a pool of samples."""
        pool = self.training.clients
        if not isinstance(pool, Population):
            return None
        positions = self.positions.to(self.training.device)
        positions = nn.functional.pad(positions, (0, max(width - positions.shape[2], 0)), value=PADDING)
        real = positions >= 0
        # Padding repeats the client's own first sample: a valid input, and no other client's data is involved.
        filled = torch.where(real, positions, positions[:1, :, :1])
        index = pool.rows(self.clients, filled.transpose(0, 1)).transpose(0, 1).contiguous()
        random = None
        if pool.transform is not None:
            step = torch.arange(1, len(index) + 1, device=index.device).view(-1, 1, 1, 1)
            ids = self.clients.to(index.device)
            random = pool.draws(self.training.seed, self.round, ids, step, index.shape[2])
            random = random.expand(*index.shape, -1)  # a transform without draws gives the same in every step
        return Tables(pool, index, real, random)

    def collate(self, step: int, shape: Shape) -> Batch:
        """The batch of local step `step` (from 1) of every active client, read from one data set after another."""
        training = self.training
        assert isinstance(training.clients, DatasetClients)
        positions = self.positions[step - 1, : shape.active, : shape.width]
        real = positions >= 0
        clients = self.clients[: shape.active].tolist()
        inputs, targets = training.clients.joint_batch(clients, [mine[mine >= 0] for mine in positions])
        counts = real.sum(1, keepdim=True)
        places = torch.arange(shape.width, device=counts.device)  # padding repeats a client's first sample
        index = (counts.cumsum(0) - counts + torch.where(real, places, 0)).to(training.device)
        return Batch(rows(inputs, index), rows(targets, index), real.to(training.device) if shape.padded else None)


class Tables(NamedTuple):
    """The round's batches as indices into a pool of samples, step by step."""

    pool: Population
    rows: Tensor
    """Indices, `[K, C, B]`."""
    real: Tensor
    """Which of them are real, not padding, `[K, C, B]`."""
    random: Tensor | None
    """The augmentation's integers, `[K, C, B, draws]`; None without a transform."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Tables:
        """Apply a function to every table."""
        random = None if self.random is None else function(self.random)
        return Tables(self.pool, function(self.rows), function(self.real), random)

    def batch(self, step: int, shape: Shape, first: int = 0) -> Batch:
        """The batch of local step `step` (from 1) of every active client from row `first` on, augmented."""
        some = step - 1, slice(first, first + shape.active), slice(shape.width)
        random = None if self.random is None else self.random[some]
        return gather(self.pool, self.rows[some], random, self.real[some] if shape.padded else None)


def gather(pool: Population, index: Tensor, random: Tensor | None, mask: Tensor | None) -> Batch:
    """The samples at indices `[C, B]` of a pool, as training sees them."""
    flat = index.reshape(-1)
    inputs = map_tree(partial(_select, flat), pool.inputs)
    if pool.transform is not None and random is not None:
        inputs = pool.transform.train(inputs, random.reshape(len(flat), random.shape[-1]))
    targets = map_tree(partial(_select, flat), pool.targets)
    return Batch(reshaped(inputs, index.shape), reshaped(targets, index.shape), mask)


def _select(flat: Tensor, leaf: Any) -> Tensor:
    return leaf.index_select(0, flat) if isinstance(leaf, Tensor) else leaf[flat]
