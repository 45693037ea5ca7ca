"""Sets a part of every client's samples apart, for its evaluation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Subset

from fedlalr.data.partition import Partition
from fedlalr.data.population import Clients, DatasetClients, Population
from fedlalr.data.random import HOLDOUT, bits, key


def hold_out(clients: Clients, share: float, seed: int) -> tuple[Clients, Clients]:
    """The clients with the samples they train on, and with those held out: a function of (seed, client, size).

    At least one sample of each kind, if a client has two. A client with one sample trains on it.
    """
    sizes = clients.sizes.numpy()
    held = held_out(sizes, share, seed)
    if isinstance(clients, Population):
        return _pooled(clients, sizes, ~held), _pooled(clients, sizes, held)
    marks = np.split(held, np.cumsum(sizes)[:-1])
    return _subsets(clients, [~mark for mark in marks]), _subsets(clients, marks)


def held_out(sizes: NDArray[np.int64], share: float, seed: int) -> NDArray[np.bool_]:
    """Which samples are held out, of all clients in a row.

    >>> held_out(np.array([5, 1, 2]), 0.4, seed=0).astype(int).tolist()
    [1, 0, 0, 1, 0, 0, 1, 0]
    """
    counts = np.minimum(np.maximum((sizes * share).round().astype(np.int64), 1), sizes - 1)
    client = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(client)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    draw = bits(key(seed, HOLDOUT), torch.from_numpy(client), torch.from_numpy(place)).numpy()
    order = np.lexsort((draw, client))  # each client's samples in random order
    held = np.zeros(len(client), dtype=bool)
    held[order] = place < np.repeat(counts, sizes)
    return held


def _pooled(clients: Population, sizes: NDArray[np.int64], mark: NDArray[np.bool_]) -> Population:
    kept = np.bincount(np.repeat(np.arange(len(sizes)), sizes), weights=mark, minlength=len(sizes)).astype(np.int64)
    partition = Partition(clients.partition.indices[mark], np.concatenate([[0], np.cumsum(kept)]))
    return clients.replaced(partition=partition)


def _subsets(clients: DatasetClients, marks: list[NDArray[np.bool_]]) -> DatasetClients:
    both = zip(clients.datasets, marks, strict=True)
    parts = [Subset(dataset, np.flatnonzero(mark).tolist()) for dataset, mark in both]
    return DatasetClients(parts, clients.device, target=clients.target, collate_fn=clients.collate_fn)
