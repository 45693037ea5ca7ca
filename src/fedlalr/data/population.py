"""The clients' data, as engines read it.

`Population` pools the samples of all clients in one place and gives each client an array of indices into it, so that a
million clients cost one integer per sample. `DatasetClients` serves clients that are data sets of their own, read batch
by batch. Inputs and targets are trees (`fedlalr.data.trees`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlalr.data.client_forms import as_pair, is_dataset, is_table, pooled_tables
from fedlalr.data.collating import Collate, Target, collate
from fedlalr.data.input_errors import check_rows, check_samples, explain_client, explain_clients
from fedlalr.data.partition import Partition
from fedlalr.data.random import AUGMENTATION, bits, key
from fedlalr.data.transforms import Transform
from fedlalr.data.trees import Tree, device_of, leaves, length, map_tree, moved, named_leaves, rows

Samples = Any
"""A tensor of samples, or an object that is indexed like one: with `device`, `to`, a length and rows."""


class Population:
    """Clients that share one pool of samples."""

    def __init__(
        self,
        inputs: Samples,
        targets: Tree,
        partition: Partition,
        *,
        transform: Transform | None = None,
        test: Any = None,
        classes: int | None = None,
        name: str = "",
    ) -> None:
        check_samples("the samples", inputs, targets)
        check_rows("the", "there are", inputs, targets)
        count = length(targets)
        if not isinstance(partition, Partition):
            raise TypeError(
                f"partition must be a result of fl.data.partition(labels, …), not a {type(partition).__name__}; "
                f"convert one list of sample indices per client with fl.data.Partition.from_lists(lists)"
            )
        indices = partition.indices
        if len(indices) and not 0 <= indices.min() <= indices.max() < count:
            raise ValueError(
                f"the partition has indices from {indices.min()} to {indices.max()}, but there are {count} "
                f"samples, 0 to {count - 1}; partition the labels of these samples"
            )
        if transform is not None and not all(hasattr(transform, name) for name in ("draws", "train", "test")):
            raise TypeError(
                f"transform must have draws, train and test, like fl.data.FlipCrop; "
                f"a {type(transform).__name__} does not"
            )
        self.inputs, self.partition = inputs, partition
        self.targets: Any = targets
        self.transform, self.test, self.classes, self.name = transform, test, classes, name
        self.sizes = torch.from_numpy(partition.sizes)
        """The number of samples of each client, int64 `[N]`, on the CPU."""
        self._starts = torch.from_numpy(partition.offsets[:-1])
        self._indices = torch.from_numpy(partition.indices).to(device_of(inputs))

    def __len__(self) -> int:
        return len(self.partition)

    def __repr__(self) -> str:
        return f"Population({self.name or 'unnamed'}: {len(self)} clients, {int(self.sizes.sum())} samples)"

    def rows(self, clients: Tensor, positions: Tensor) -> Tensor:
        """Pool indices of the samples at `positions` `[C, …]` of each client `[C]`."""
        starts = self._starts[clients].to(positions.device)
        return self._indices[starts.view(-1, *[1] * (positions.dim() - 1)) + positions]

    def draws(self, seed: int, round: int, clients: Tensor, step: int | Tensor, width: int) -> Tensor:
        """The augmentation's random integers for one local batch of each client, `[C, width, draws]`."""
        place = torch.arange(width, device=clients.device)[:, None]
        draw = torch.arange(0 if self.transform is None else self.transform.draws, device=clients.device)
        return bits(key(seed, AUGMENTATION, round), clients[:, None, None], step, place, draw)

    def batch(self, client: int, positions: Tensor) -> tuple[Tree, Tree]:
        """Inputs and targets at positions within a client's own samples, ready for the model, without augmentation."""
        inputs, targets = self._at(client, positions)
        return (self.transform.test(inputs) if self.transform is not None else inputs), targets

    def training_batch(self, client: int, positions: Tensor, seed: int, round: int, step: int) -> tuple[Tree, Tree]:
        """The same with the augmentation of (seed, round, client, step)."""
        inputs, targets = self._at(client, positions)
        if self.transform is not None:
            alone = torch.tensor([client], device=self._indices.device)
            inputs = self.transform.train(inputs, self.draws(seed, round, alone, step, len(positions))[0])
        return inputs, targets

    def _at(self, client: int, positions: Tensor) -> tuple[Any, Any]:
        start = int(self._starts[client])
        index = self._indices[start + positions.to(self._indices.device)]
        return rows(self.inputs, index), rows(self.targets, index)

    def to(self, device: torch.device) -> Population:
        """The same clients with their samples on a device."""
        if all(leaf.device == device for leaf in (*leaves(self.inputs), *leaves(self.targets))):
            return self
        return self.replaced(inputs=moved(self.inputs, device), targets=moved(self.targets, device))

    def replaced(self, **changes: Any) -> Population:
        """A population that differs in some arguments."""
        names = ("inputs", "targets", "partition", "transform", "test", "classes", "name")
        return Population(**{name: getattr(self, name) for name in names} | changes)


class DatasetClients:
    """Clients that are separate data sets. Samples are read and collated when a batch needs them."""

    def __init__(
        self,
        datasets: Sequence[Any],
        device: torch.device | None = None,
        *,
        target: Target | None = None,
        collate_fn: Collate | None = None,
    ) -> None:
        self.datasets = datasets
        self.device = device or torch.device("cpu")
        self.target, self.collate_fn = target, collate_fn
        self.sizes = torch.tensor([len(dataset) for dataset in datasets], device="cpu")

    @property
    def note(self) -> str:
        """How the samples are read, for the user."""
        why = "because collate_fn forms the batches" if self.collate_fn is not None else "as the data sets return them"
        return f"the clients' samples are read batch by batch, {why}"

    def __len__(self) -> int:
        return len(self.datasets)

    def read(self, client: int, positions: Tensor) -> list[Any]:
        """The samples at positions of a client's data set."""
        dataset, places = self.datasets[client], positions.tolist()
        if not isinstance(dataset, list) and is_table(dataset):  # of Hugging Face, faster several at once
            return list(dataset.__getitems__(places))
        return [dataset[place] for place in places]

    def collate(self, samples: list[Any], whose: str) -> tuple[Tree, Tree]:
        """Inputs and targets of samples that were read."""
        inputs, targets = collate(samples, whose, self.target, self.collate_fn)
        return moved(inputs, self.device), moved(targets, self.device)

    def batch(self, client: int, positions: Tensor) -> tuple[Tree, Tree]:
        return self.collate(self.read(client, positions), f"client {client}'s")

    def joint_batch(self, clients: Sequence[int], positions: Sequence[Tensor]) -> tuple[Tree, Tree]:
        """The batches of several clients one after the other, collated together and so padded alike."""
        samples = [sample for each in zip(clients, positions, strict=True) for sample in self.read(*each)]
        return self.collate(samples, f"client {clients[0]}'s" if len(clients) == 1 else "the clients'")

    def training_batch(self, client: int, positions: Tensor, seed: int, round: int, step: int) -> tuple[Tree, Tree]:
        return self.batch(client, positions)

    def to(self, device: torch.device) -> DatasetClients:
        return DatasetClients(self.datasets, device, target=self.target, collate_fn=self.collate_fn)


Clients = Population | DatasetClients
"""The clients' data, as an engine reads it."""


def as_clients(clients: object, target: Target | None = None, collate_fn: Collate | None = None) -> Clients:
    """Accept what `fl.run` accepts: a population, or a sequence of (inputs, targets) pairs, dicts or data sets."""
    if isinstance(clients, Population | DatasetClients):
        _check_not_empty(clients.sizes)
        if isinstance(clients, DatasetClients) and (target or collate_fn):
            target, collate_fn = target or clients.target, collate_fn or clients.collate_fn
            return DatasetClients(clients.datasets, clients.device, target=target, collate_fn=collate_fn)
        return clients
    if not isinstance(clients, Sequence) or isinstance(clients, str | Partition) or _is_one_pair(clients):
        raise TypeError(explain_clients(clients))
    if not clients:
        raise ValueError("there are no clients; pass at least one (inputs, targets) pair")
    collated = collate_fn is not None
    pairs = [None if collated else as_pair(client, f"client {i}'s", target) for i, client in enumerate(clients)]
    if all(pair is not None for pair in pairs):
        return _pool([pair for pair in pairs if pair is not None])
    if all(is_dataset(client, collated) for client in clients):
        datasets = DatasetClients(clients, target=target, collate_fn=collate_fn)
        _check_not_empty(datasets.sizes)
        tables = None if collated else pooled_tables(clients, target)
        return datasets if tables is None else _pool(tables)
    odd = next((i for i, one in enumerate(clients) if pairs[i] is None and not is_dataset(one, collated)), None)
    if odd is None:
        raise TypeError(
            "some clients are pairs of tensors and others torch Datasets; convert each pair with "
            "torch.utils.data.TensorDataset(inputs, targets)"
        )
    if collated and as_pair(clients[odd], f"client {odd}'s", target) is not None:
        raise TypeError(
            f"collate_fn= forms batches of the samples of data sets, but client {odd} consists of tensors; leave "
            f"collate_fn out, or pass data sets"
        )
    raise TypeError(explain_client(odd, clients[odd]))


def _is_one_pair(clients: Sequence[object]) -> bool:
    return len(clients) == 2 and any(isinstance(part, Tensor) for part in clients)


def _pool(pairs: Sequence[tuple[Tree, Tree]]) -> Population:
    first = [named_leaves(part) for part in pairs[0]]
    for i, pair in enumerate(pairs):
        check_rows(f"client {i}'s", f"client {i} has", *pair)
        for what, part, theirs in zip(("inputs", "targets"), pair, first, strict=True):
            _check_alike(i, what, named_leaves(part), theirs)
        devices = [device_of(part) for part in pair]
        if devices[0] != devices[1]:
            raise ValueError(f"client {i} has inputs on {devices[0]} and targets on {devices[1]}; use one device")
    sizes = torch.tensor([length(targets) for _, targets in pairs], device="cpu")
    _check_not_empty(sizes)
    partition = Partition(np.arange(int(sizes.sum())), np.concatenate([[0], np.cumsum(sizes.numpy())]))
    inputs, targets = (map_tree(lambda *parts: torch.cat(parts), *trees) for trees in zip(*pairs, strict=True))
    return Population(inputs, targets, partition)


def _check_alike(client: int, what: str, mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Reject a client whose samples differ in form from client 0's."""
    if mine.keys() != theirs.keys():
        shown = " and ".join(", ".join(names) or "one tensor" for names in (mine, theirs))
        raise ValueError(f"client {client}'s and client 0's {what} differ: {shown}; all clients must agree")
    for name, tensor in mine.items():
        other = theirs[name]
        if tensor.device != other.device:
            raise ValueError(
                f"client {client}'s {what}{name} are on {tensor.device} but client 0's on {other.device}; "
                f"put all data on one device (the run moves it to the device it uses)"
            )
        if tensor.shape[1:] != other.shape[1:] or tensor.dtype != other.dtype:
            raise ValueError(
                f"client {client}'s {what}{name} are {tuple(tensor.shape[1:])} {tensor.dtype} per sample, "
                f"client 0's {tuple(other.shape[1:])} {other.dtype}; all clients must agree"
            )


def _check_not_empty(sizes: Tensor) -> None:
    empty = torch.nonzero(sizes == 0).flatten().tolist()
    if not len(sizes):
        raise ValueError("there are no clients; pass at least one (inputs, targets) pair")
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (" …" if len(empty) > 5 else "")
        raise ValueError(f"client {shown} has no samples; leave empty clients out")
