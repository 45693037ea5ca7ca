"""The forms in which a client's data may be passed, and which of them have their samples in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from fedlalr.data.collating import Target, collate, split
from fedlalr.data.trees import Tree, as_tree, is_tree, leaves

MOST_POOLED = 4 << 30
"""Bytes of samples up to which tables are read into memory."""


def as_pair(client: object, whose: str, target: Target | None) -> tuple[Tree, Tree] | None:
    """Inputs and targets of a client whose samples are tensors: a pair, or a dict of both; None for other forms."""
    client = plain_tensors(client)
    if isinstance(client, Mapping):
        samples = as_tree(client)
        return split(samples, target, whose) if is_tree(samples) else None
    if isinstance(client, list) and not all(isinstance(part, Tensor) for part in client):
        return None
    if not isinstance(client, Sequence) or len(client) != 2:
        return None
    inputs, targets = map(as_tree, client)
    return (inputs, targets) if is_tree(inputs) and is_tree(targets) else None


def plain_tensors(data: Any) -> Any:
    """The tensors of a data set that returns them unchanged; a subclass may change them, so it does not count."""
    is_plain = isinstance(data, TensorDataset) and type(data).__getitem__ is TensorDataset.__getitem__
    return data.tensors if is_plain else data


def is_dataset(client: object, collated: bool = False) -> bool:
    """Whether samples can be read by index. Those of a stream cannot, even if it knows its length.

    A list of pairs is one if a `collate_fn` forms the batches; otherwise it may be meant as something else.
    """
    if collated and isinstance(client, list):
        return all(isinstance(sample, Mapping) or _is_sample(sample) for sample in client)
    if isinstance(client, Dataset):
        return hasattr(client, "__len__") and not isinstance(client, IterableDataset)
    return is_table(client)


def _is_sample(sample: object) -> bool:
    return isinstance(sample, tuple | list) and len(sample) == 2


def is_table(client: object) -> bool:
    """Whether a client is a Hugging Face data set, or a list of samples that are dicts."""
    if isinstance(client, list):
        return bool(client) and all(isinstance(sample, Mapping) for sample in client)
    return type(client).__module__.partition(".")[0] == "datasets" and hasattr(client, "__getitems__")


def pooled_tables(clients: Sequence[Any], target: Target | None) -> list[tuple[Tree, Tree]] | None:
    """Inputs and targets of clients that are tables, if all of them fit into memory and no sample is computed."""
    if not all(is_table(client) and not _computes(client) for client in clients):
        return None
    each = sum(leaf.nbytes for part in collate([clients[0][0]], "client 0's", target) for leaf in leaves(part))
    if each * sum(map(len, clients)) > MOST_POOLED:
        return None
    return [_read(client, f"client {i}'s", target) for i, client in enumerate(clients)]


def _computes(table: Any) -> bool:
    """Whether a table's samples are computed by a function of the caller (`with_transform`) at every read."""
    return not isinstance(table, list) and table.format["type"] == "custom"


def _read(table: Any, whose: str, target: Target | None) -> tuple[Tree, Tree]:
    if not isinstance(table, list):
        columns = table.with_format("torch", columns=table.format["columns"])[:]
        if is_tree(columns):
            return split(columns, target, whose)
        table = list(table)  # samples of different shapes, or text: collate says which
    return collate(table, whose, target)
