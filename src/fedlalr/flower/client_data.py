"""The clients' data on both sides of the exchange: the server has none, a node has its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedlalr.data.client_forms import as_pair, is_dataset
from fedlalr.data.collating import Collate, Target
from fedlalr.data.input_errors import check_rows, explain_client
from fedlalr.data.partition import Partition
from fedlalr.data.population import Clients, DatasetClients, Population, as_clients
from fedlalr.data.trees import Tree, length


class RemoteClients:
    """The clients as seen by the server: only their number, and the test set of their population if it has one."""

    def __init__(self, population: int, test: object = None) -> None:
        self.test, self.sizes = test, torch.zeros(population, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, client: int, positions: Tensor) -> tuple[Tree, Tree]:
        raise RuntimeError(f"the data of client {client} is on its node; the server has none")

    def training_batch(self, client: int, positions: Tensor, seed: int, round: int, step: int) -> tuple[Tree, Tree]:
        return self.batch(client, positions)

    def to(self, device: torch.device) -> RemoteClients:
        return self


def own_data(
    data: object, client: int, population: int, target: Target | None = None, collate_fn: Collate | None = None
) -> Clients:
    """A node's data under its client's id, so that batches and augmentation equal those of a simulation.

    `data` is a client in any form that `fl.run` accepts, or a population of only this client or of all clients.
    """
    whose = f"client {client}'s"
    pair = as_pair(data, whose, target) if collate_fn is None else None
    if pair is not None:
        check_rows(whose, f"client {client} has", *pair)
        clients: Clients = Population(*pair, _alone(np.arange(length(pair[1])), client, population))
    elif isinstance(data, Population | DatasetClients) or is_dataset(data, collate_fn is not None):
        mine = as_clients(data if isinstance(data, Population | DatasetClients) else [data], target, collate_fn)
        assert isinstance(mine, Population | DatasetClients)
        clients = _placed(mine, client, population)
    else:
        raise TypeError(
            f"{explain_client(client, data)}. The data function may also return a population, as fl.data.load does"
        )
    if int(clients.sizes[client]) == 0:
        raise ValueError(f"client {client} has no samples to train on")
    return clients


def _placed(data: Population | DatasetClients, client: int, population: int) -> Clients:
    if len(data) == population:
        return data
    if len(data) != 1:
        raise ValueError(
            f"the data function returned {len(data)} clients; it must return this node's client or all {population}"
        )
    if isinstance(data, DatasetClients):
        nobody: Dataset[Any] = TensorDataset(torch.empty(0))
        datasets = [data.datasets[0] if place == client else nobody for place in range(population)]
        return DatasetClients(datasets, target=data.target, collate_fn=data.collate_fn)
    return data.replaced(partition=_alone(np.asarray(data.partition[0]), client, population))


def _alone(rows: np.ndarray[Any, Any], client: int, population: int) -> Partition:
    """A partition in which one client has all the rows and the others have none."""
    return Partition(rows, np.where(np.arange(population + 1) > client, len(rows), 0))
