"""The batches of a stack of clients: which samples, in which local step, padded to one shape.

Clients are put in order of their number of local steps, the longest first, so that those still training are always the
first rows of the stack and nothing is computed for the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.data.batches import plan
from fedlalr.data.population import Population
from fedlalr.training.stacked_gradient import Batch
from fedlalr.training.work import Training


@dataclass(frozen=True)
class Shape:
    """How one local step of a stack is laid out."""

    active: int
    """Clients still training: the first rows."""
    width: int
    """Samples in the longest batch."""
    padded: bool
    """Whether some client's batch is shorter."""
    lone: bool
    """Whether some client of a padded step has one sample."""


class Feed:
    """The whole round's batches for a stack of clients, planned up front."""

    def __init__(self, training: Training, round: int, clients: Tensor) -> None:
        self.training, self.round = training, round
        steps = training.steps(round, clients)
        self.order = steps.argsort(descending=True, stable=True)
        """The rows of the caller's clients, in the order of the stack."""
        self.clients, self.steps = clients[self.order], steps[self.order]
        pool = training.clients if isinstance(training.clients, Population) else None
        where = training.device if pool is not None else torch.device("cpu")
        self._ids = self.clients.to(where)
        sizes = training.clients.sizes[self.clients]
        self._positions = plan(
            training.seed,
            round,
            self._ids,
            sizes.to(where),
            self.steps.to(where),
            training.batch_size,
            training.drop_last,
        )
        real = self._positions >= 0
        self.counts = real.sum(-1).cpu()
        """Real samples of every client and step, `[C, K]`."""
        self._real = real
        if pool is not None:
            # Padding repeats the client's own first sample: it can be computed with, and no other client's data comes
            # near.
            filled = torch.where(real, self._positions, self._positions[:, :1, :1])
            self._rows = pool.rows(self.clients, filled)

    @property
    def longest(self) -> int:
        """K of the client with the most steps."""
        return int(self.steps[0])

    def shapes(self) -> list[Shape]:
        """The layout of every local step."""
        shapes = []
        for k in range(self.longest):
            active = int((self.steps > k).sum())
            counts = self.counts[:active, k]
            least, most = int(counts.min()), int(counts.max())
            shapes.append(Shape(active, most, least < most, least == 1 and least < most))
        return shapes

    def batch(self, step: int, shape: Shape) -> Batch:
        """The batch of local step `step` (from 1) of every active client, augmented."""
        mask = self._real[: shape.active, step - 1, : shape.width] if shape.padded else None
        pool = self.training.clients
        if not isinstance(pool, Population):
            return self._collated(step, shape, mask)
        rows = self._rows[: shape.active, step - 1, : shape.width]
        flat = rows.reshape(-1)
        inputs, targets = pool.inputs[flat], pool.targets[flat]
        if pool.transform is not None:
            random = pool.draws(self.training.seed, self.round, self._ids[: shape.active], step, shape.width)
            inputs = pool.transform.train(inputs, random.flatten(0, 1))
        inputs, targets = (part.view(*rows.shape, *part.shape[1:]) for part in (inputs, targets))
        return Batch(inputs, targets, mask, shape.lone)

    def _collated(self, step: int, shape: Shape, mask: Tensor | None) -> Batch:
        """The same from data sets that are read client by client."""
        training, inputs, targets = self.training, [], []
        for row, client in enumerate(self.clients[: shape.active].tolist()):
            positions = self._positions[row, step - 1]
            one = training.clients.training_batch(client, positions[positions >= 0], training.seed, self.round, step)
            repeat = torch.arange(shape.width, device=one[1].device)
            repeat = torch.where(repeat < len(one[1]), repeat, 0)
            inputs.append(one[0][repeat])
            targets.append(one[1][repeat])
        stacked = torch.stack(inputs), torch.stack(targets)
        return Batch(*stacked, None if mask is None else mask.to(training.device), shape.lone)
