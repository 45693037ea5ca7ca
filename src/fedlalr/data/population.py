"""The clients' data, as engines read it.

`Population` pools the samples of all clients in one place and gives each client an array of indices into it, so that a
million clients cost one integer per sample. `DatasetClients` serves clients that are torch data sets of their own, read
sample by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from fedlalr.data.input_errors import (
    check_rows,
    explain_client,
    explain_clients,
    explain_part,
    explain_sample,
    explain_shapes,
)
from fedlalr.data.partition import Partition
from fedlalr.data.random import AUGMENTATION, bits, key
from fedlalr.data.transforms import Transform


class Samples(Protocol):
    """A tensor of samples, or an object that is indexed like one."""

    @property
    def device(self) -> torch.device: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor: ...

    def to(self, device: torch.device, /) -> Any: ...


class Clients(Protocol):
    """The interface of the clients' data that an engine uses."""

    @property
    def sizes(self) -> Tensor:
        """The number of samples of each client, int64 `[N]`, on the CPU."""
        ...

    def __len__(self) -> int: ...

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets at positions within a client's own samples, ready for the model, without augmentation."""
        ...

    def training_batch(self, client: int, positions: Tensor, seed: int, round: int, step: int) -> tuple[Tensor, Tensor]:
        """The same with the augmentation of (seed, round, client, step)."""
        ...

    def to(self, device: torch.device) -> Clients:
        """The same clients with their samples on a device."""
        ...


class Population:
    """Clients that share one pool of samples."""

    def __init__(
        self,
        inputs: Samples,
        targets: Tensor,
        partition: Partition,
        *,
        transform: Transform | None = None,
        test: tuple[Samples, Tensor] | None = None,
        classes: int | None = None,
        name: str = "",
    ) -> None:
        if isinstance(inputs, np.ndarray) or isinstance(targets, np.ndarray):
            raise TypeError("the samples are NumPy arrays; convert them with torch.from_numpy(array)")
        if not hasattr(inputs, "device") or not isinstance(targets, Tensor):
            raise TypeError(
                f"the samples must be two tensors, inputs and targets, not {type(inputs).__name__} and "
                f"{type(targets).__name__}; convert them with torch.tensor(values)"
            )
        check_rows("the", inputs, targets)
        if len(inputs) != len(targets):
            raise ValueError(f"there are {len(inputs)} inputs but {len(targets)} targets; they must pair up")
        if not isinstance(partition, Partition):
            raise TypeError(
                f"partition must be a result of fl.data.partition(labels, …), not a {type(partition).__name__}; "
                f"convert one list of sample indices per client with fl.data.Partition.from_lists(lists)"
            )
        indices = partition.indices
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(targets):
            raise ValueError(
                f"the partition has indices from {indices.min()} to {indices.max()}, but there are {len(targets)} "
                f"samples, 0 to {len(targets) - 1}; partition the labels of these samples"
            )
        if transform is not None and not all(hasattr(transform, name) for name in ("draws", "train", "test")):
            raise TypeError(
                f"transform must have draws, train and test, like fl.data.FlipCrop; "
                f"a {type(transform).__name__} does not"
            )
        self.inputs, self.targets, self.partition = inputs, targets, partition
        self.transform, self.test, self.classes, self.name = transform, test, classes, name
        self._sizes = torch.from_numpy(partition.sizes)
        self._starts = torch.from_numpy(partition.offsets[:-1])
        self._indices = torch.from_numpy(partition.indices).to(inputs.device)

    @property
    def sizes(self) -> Tensor:
        return self._sizes

    def __len__(self) -> int:
        return len(self.partition)

    def __repr__(self) -> str:
        return f"Population({self.name or 'unnamed'}: {len(self)} clients, {int(self.sizes.sum())} samples)"

    def rows(self, clients: Tensor, positions: Tensor) -> Tensor:
        """Pool indices of the samples at `positions` `[C, …]` of each client `[C]`; padding comes out as −1."""
        starts = self._starts[clients].to(positions.device)
        starts = starts.view(-1, *[1] * (positions.dim() - 1))
        rows = self._indices[(starts + positions.clamp(min=0))]
        return torch.where(positions < 0, positions, rows)

    def gather(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Raw inputs and targets at pool indices of any shape."""
        flat = rows.reshape(-1)
        inputs, targets = self.inputs[flat], self.targets[flat]
        return inputs.view(*rows.shape, *inputs.shape[1:]), targets.view(*rows.shape, *targets.shape[1:])

    def draws(self, seed: int, round: int, clients: Tensor, step: int | Tensor, width: int) -> Tensor:
        """The augmentation's random integers for one local batch of each client, `[C, width, draws]`."""
        count = self.transform.draws if self.transform is not None else 0
        if not count:
            return clients.new_empty(len(clients), width, 0)
        place = torch.arange(width, device=clients.device)[:, None]
        draw = torch.arange(count, device=clients.device)
        return bits(key(seed, AUGMENTATION, round), clients[:, None, None], step, place, draw)

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self._at(client, positions)
        return (self.transform.test(inputs) if self.transform is not None else inputs), targets

    def training_batch(self, client: int, positions: Tensor, seed: int, round: int, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self._at(client, positions)
        if self.transform is not None:
            random = self.draws(seed, round, torch.tensor([client], device=inputs.device), step, len(positions))[0]
            inputs = self.transform.train(inputs, random)
        return inputs, targets

    def _at(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        start = int(self._starts[client])
        rows = self._indices[start + positions.to(self._indices.device)]
        return self.inputs[rows], self.targets[rows]

    def to(self, device: torch.device) -> Population:
        if self.inputs.device == device and self.targets.device == device:
            return self
        return Population(
            cast(Samples, self.inputs.to(device)),
            self.targets.to(device),
            self.partition,
            transform=self.transform,
            test=self.test,
            classes=self.classes,
            name=self.name,
        )


class DatasetClients:
    """Clients that are separate torch data sets. Samples are read and collated when a batch needs them."""

    def __init__(self, datasets: Sequence[Dataset[Any]], device: torch.device | None = None) -> None:
        self.datasets = datasets
        self.device = device or torch.device("cpu")
        self._sizes = torch.tensor([len(dataset) for dataset in datasets], device="cpu")  # type: ignore[arg-type]

    @property
    def sizes(self) -> Tensor:
        return self._sizes

    def __len__(self) -> int:
        return len(self.datasets)

    def batch(self, client: int, positions: Tensor) -> tuple[Tensor, Tensor]:
        dataset = self.datasets[client]
        samples = [dataset[int(position)] for position in positions]
        for sample in samples:
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise ValueError(explain_sample(client, sample))
        try:
            inputs, targets = default_collate(samples)
        except (RuntimeError, TypeError) as error:
            raise ValueError(explain_shapes(client, samples) or f"client {client}'s samples: {error}") from error
        for what, part, one in zip(("input", "target"), (inputs, targets), samples[0], strict=True):
            if not isinstance(part, Tensor):
                raise ValueError(explain_part(client, what, one))
        return inputs.to(self.device), targets.to(self.device)

    def training_batch(self, client: int, positions: Tensor, seed: int, round: int, step: int) -> tuple[Tensor, Tensor]:
        return self.batch(client, positions)

    def to(self, device: torch.device) -> DatasetClients:
        return DatasetClients(self.datasets, device)


def as_clients(clients: object) -> Clients:
    """Accept what `fl.run` accepts: a population, or a sequence of (inputs, targets) tensors or torch data sets."""
    if isinstance(clients, Population | DatasetClients):
        _check_not_empty(clients.sizes)
        return clients
    if not isinstance(clients, Sequence) or isinstance(clients, str | Partition) or _is_pair(clients):
        raise TypeError(explain_clients(clients))
    if not clients:
        raise ValueError("there are no clients; pass at least one (inputs, targets) pair")
    pairs: list[Any] = [plain_tensors(client) for client in clients]
    if all(_is_pair(pair) for pair in pairs):
        return _pool(pairs)
    if all(map(is_dataset, clients)):
        datasets = DatasetClients(clients)
        _check_not_empty(datasets.sizes)
        return datasets
    odd = next((i for i, pair in enumerate(pairs) if not _is_pair(pair) and not is_dataset(clients[i])), None)
    if odd is None:
        raise TypeError(
            "some clients are pairs of tensors and others torch Datasets; convert each pair with "
            "torch.utils.data.TensorDataset(inputs, targets)"
        )
    raise TypeError(explain_client(odd, clients[odd]))


def plain_tensors(data: Any) -> Any:
    """The tensors of a data set that returns them unchanged; a subclass may change them, so it does not count."""
    is_plain = isinstance(data, TensorDataset) and type(data).__getitem__ is TensorDataset.__getitem__
    return data.tensors if is_plain else data


def is_dataset(client: object) -> TypeGuard[Dataset[Any]]:
    """Whether samples can be read by index. Those of a stream cannot, even if it knows its length."""
    return isinstance(client, Dataset) and hasattr(client, "__len__") and not isinstance(client, IterableDataset)


def _is_pair(client: object) -> bool:
    return isinstance(client, Sequence) and len(client) == 2 and all(isinstance(part, Tensor) for part in client)


def _pool(pairs: Sequence[tuple[Tensor, Tensor]]) -> Population:
    first_inputs, first_targets = pairs[0]
    for i, (inputs, targets) in enumerate(pairs):
        check_rows(f"client {i}'s", inputs, targets)
        if len(inputs) != len(targets):
            raise ValueError(f"client {i} has {len(inputs)} inputs but {len(targets)} targets; they must pair up")
        for what, mine, theirs in (("inputs", inputs, first_inputs), ("targets", targets, first_targets)):
            if mine.device != theirs.device:
                raise ValueError(
                    f"client {i}'s {what} are on {mine.device} but client 0's on {theirs.device}; "
                    f"put all data on one device (the run moves it to the device it uses)"
                )
            if mine.shape[1:] != theirs.shape[1:] or mine.dtype != theirs.dtype:
                raise ValueError(
                    f"client {i}'s {what} are {tuple(mine.shape[1:])} {mine.dtype} per sample, "
                    f"client 0's {tuple(theirs.shape[1:])} {theirs.dtype}; all clients must agree"
                )
        if inputs.device != targets.device:
            raise ValueError(
                f"client {i} has inputs on {inputs.device} and targets on {targets.device}; use one device"
            )
    sizes = torch.tensor([len(targets) for _, targets in pairs], device="cpu")
    _check_not_empty(sizes)
    partition = Partition(np.arange(int(sizes.sum())), np.concatenate([[0], np.cumsum(sizes.numpy())]))
    return Population(torch.cat([i for i, _ in pairs]), torch.cat([t for _, t in pairs]), partition)


def _check_not_empty(sizes: Tensor) -> None:
    empty = torch.nonzero(sizes == 0).flatten().tolist()
    if not len(sizes):
        raise ValueError("there are no clients; pass at least one (inputs, targets) pair")
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (" …" if len(empty) > 5 else "")
        raise ValueError(f"client {shown} has no samples; leave empty clients out")
