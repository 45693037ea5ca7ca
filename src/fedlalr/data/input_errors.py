"""Errors for clients in a form that a run cannot read, with the conversion for each common form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, ValuesView

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlalr.data.partition import Partition
from fedlalr.data.trees import as_tree, is_tree, leaves, named_leaves

_WANTED = (
    "every client must be a pair (inputs, targets) of tensors, or of tuples or dicts of them, or every client a torch "
    "Dataset with a length"
)
_PAD = "; pad sequences to one length with torch.nn.functional.pad(sequence, (0, length - len(sequence)))"


def check_samples(what: str, inputs: object, targets: object) -> None:
    """Reject a pool of samples that are not tensors, or trees of them; `what` names them."""
    every = (*leaves(inputs), *leaves(targets))
    if any(isinstance(leaf, np.ndarray) for leaf in every):
        raise TypeError(f"{what} are NumPy arrays; convert them with torch.from_numpy(array)")
    if not all(hasattr(leaf, "device") for leaf in leaves(inputs)) or not is_tree(targets):
        raise TypeError(
            f"{what} must be two tensors, inputs and targets, or tuples or dicts of tensors, not "
            f"{type(inputs).__name__} and {type(targets).__name__}; convert them with torch.tensor(values)"
        )


def check_rows(whose: str, have: str, inputs: object, targets: object) -> None:
    """Reject tensors that cannot be indexed by sample along the first dimension, or disagree in the number of samples.

    `have` begins the sentence about the numbers, such as "client 1 has".
    """
    trees = (("inputs", inputs), ("targets", targets))
    parts = {f"{what}{name}": leaf for what, tree in trees for name, leaf in named_leaves(tree).items()}
    for what, values in parts.items():
        if not isinstance(values, Tensor):
            continue
        if values.is_nested:
            form = f"a nested tensor; pad all samples to one length with torch.nested.to_padded_tensor({what}, 0)"
        elif values.layout != torch.strided:
            form = f"a sparse tensor; convert it with {what}.to_dense()"
        elif values.dim() == 0:
            form = f"a single number; turn one sample into a batch of one with {what}.unsqueeze(0)"
        else:
            continue
        raise TypeError(f"{whose} {what} are {form}")
    first, *others = parts
    for other in others:
        if len(parts[other]) != len(parts[first]):
            counts = f"{len(parts[first])} {first} but {len(parts[other])} {other}"
            raise ValueError(f"{have} {counts}; they must pair up")


_FIXES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (Mapping, "; pass its values: list(clients.values())"),
    ((Iterator, ValuesView), "; convert it with list(clients)"),
    (Partition, "; pass it with its samples: fl.data.Population(inputs, targets, partition)"),
    (
        (tuple, list),
        " of the inputs and targets of all clients; partition them with fl.data.partition(targets, clients=10)",
    ),
    (Dataset, "; split one data set into several, for example with torch.utils.data.random_split(dataset, [0.1] * 10)"),
)
"""What clients that are not a sequence of clients may be, and how to convert them."""


def explain_clients(clients: object) -> str:
    """The error for clients that are not a sequence."""
    fix = next((fix for kind, fix in _FIXES if isinstance(clients, kind)), "")
    if not fix and hasattr(clients, "shard"):  # of Hugging Face
        fix = "; split one data set into several, for example [dataset.shard(10, i) for i in range(10)]"
    return (
        f"clients must be a sequence of (inputs, targets) tensors or torch Datasets, or what fl.data.load returns, "
        f"not {type(clients).__name__}{fix}"
    )


def explain_client(number: int, client: object) -> str:
    """The error for a client that is neither a pair of tensors nor a data set."""
    parts = list(client) if isinstance(client, tuple | list) else [client]
    if any(isinstance(part, np.ndarray) for part in parts):
        return f"client {number} consists of NumPy arrays; convert them with torch.from_numpy(array)"
    if any(type(part).__module__.partition(".")[0] == "pandas" for part in parts):
        return (
            f"client {number} consists of pandas tables; convert inputs with "
            f"torch.tensor(table.to_numpy(), dtype=torch.float32) and labels with torch.tensor(column.to_numpy())"
        )
    if isinstance(client, Mapping):
        return f"client {number} is a {type(client).__name__}{_odd_value(client)}"
    if isinstance(client, DataLoader):
        return (
            f"client {number} is a DataLoader; pass its data set, loader.dataset: the run forms the batches itself, "
            f"with collate_fn=loader.collate_fn if the loader has its own. It shuffles the samples itself: the "
            f"loader's batch size, sampler and shuffling do not count"
        )
    return f"client {number} is {_form(client)}; {_WANTED}{_conversion(client)}"


def _odd_value(client: Mapping[str, object]) -> str:
    """The end of the error for a dict that does not consist of tensors."""
    values = named_leaves(as_tree(client)).items()
    name, value = next((name, value) for name, value in values if not isinstance(value, Tensor))
    if hasattr(value, "shard"):  # data sets of Hugging Face, such as those to train and to test
        return f" of data sets; pass one of them, such as data{name}"
    return (
        f" whose {name} is a {type(value).__name__}; every value must be a tensor with a row for each sample: "
        f"torch.tensor(values), or return_tensors='pt' of a tokenizer"
    )


def _form(client: object) -> str:
    if isinstance(client, tuple | list) and len(client) == 2:
        return f"a pair of {' and '.join(type(part).__name__ for part in client)}"
    if isinstance(client, tuple | list):
        return f"a {type(client).__name__} of {len(client)}"
    kind = type(client)
    return f"a {kind.__module__.partition('.')[0]}.Dataset" if kind.__name__ == "Dataset" else f"a {kind.__name__}"


def _conversion(client: object) -> str:
    if isinstance(client, tuple | list) and len(client) == 2:
        return ". Convert lists to tensors with torch.tensor(values) or torch.stack(samples)" + _PAD
    if isinstance(client, list) and client and isinstance(client[0], tuple | list) and len(client[0]) == 2:
        return (
            ". Convert a list of samples to the pair (torch.stack([input for input, _ in samples]), "
            "torch.tensor([target for _, target in samples])), or, if they differ in length, pass collate_fn=, a "
            "function that pads the samples of a batch"
        )
    if isinstance(client, Dataset):
        return ". Read the samples of a stream into tensors first"
    if hasattr(client, "__getitem__") and hasattr(client, "__len__") and not isinstance(client, Sequence | Mapping):
        return ". Wrap it in a class Own(torch.utils.data.Dataset) whose __getitem__ returns (input, target)"
    return ""
