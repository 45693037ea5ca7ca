"""Errors for clients in a form that a run cannot read, with the conversion for each common form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, ValuesView

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlalr.data.partition import Partition

_WANTED = "every client must be a pair of tensors (inputs, targets), or every client a torch Dataset with a length"
_PAD = "; pad sequences to one length with torch.nn.functional.pad(sequence, (0, length - len(sequence)))"


def check_rows(whose: str, inputs: object, targets: object) -> None:
    """Reject tensors that cannot be indexed by sample along the first dimension."""
    for what, values in (("inputs", inputs), ("targets", targets)):
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


def explain_clients(clients: object) -> str:
    """The error for clients that are not a sequence."""
    if isinstance(clients, Mapping):
        fix = "; pass its values: list(clients.values())"
    elif isinstance(clients, Iterator | ValuesView):
        fix = "; convert it with list(clients)"
    elif isinstance(clients, Partition):
        fix = "; pass it with its samples: fl.data.Population(inputs, targets, partition)"
    elif isinstance(clients, tuple | list):
        fix = " of the inputs and targets of all clients; partition them with fl.data.partition(targets, clients=10)"
    elif isinstance(clients, Dataset):
        fix = "; split one data set into several, for example with torch.utils.data.random_split(dataset, [0.1] * 10)"
    else:
        fix = ""
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
    if isinstance(client, DataLoader):
        return f"client {number} is a DataLoader; pass its data set, loader.dataset: the run forms the batches itself"
    return f"client {number} is {_form(client)}; {_WANTED}{_conversion(client)}"


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
            "torch.tensor([target for _, target in samples]))"
        )
    if isinstance(client, Dataset):
        return ". Read the samples of a stream into tensors first"
    if hasattr(client, "__getitem__") and hasattr(client, "__len__") and not isinstance(client, Sequence | Mapping):
        return ". Wrap it in a class Own(torch.utils.data.Dataset) whose __getitem__ returns (input, target)"
    return ""


def explain_sample(client: int, sample: object) -> str:
    """The error for a data set whose samples are not (input, target)."""
    start = f"client {client}'s data set must return (input, target) for a sample, not "
    if isinstance(sample, Mapping):
        names = [repr(name) for name in sample]
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        first, last = (names[0], names[-1]) if names else ("'input'", "'target'")
        return (
            f"{start}a dict of {shown}; wrap it in a Dataset whose __getitem__ returns two of them, such as "
            f"(sample[{first}], sample[{last}])"
        )
    if isinstance(sample, tuple | list):
        return (
            f"{start}{len(sample)} items; pack several inputs into one tensor with torch.stack or torch.cat "
            f"and unpack it in the model's forward"
        )
    return f"{start}a {type(sample).__name__}"


def explain_part(client: int, what: str, part: object) -> str:
    """The error for an input or target of a sample that is not a tensor, array or number."""
    if isinstance(part, str):
        fix = "convert words to numbers, such as indices in a vocabulary"
    elif isinstance(part, tuple | list | Mapping) and any(isinstance(one, Tensor) for one in _values(part)):
        fix = "pack several tensors into one with torch.stack or torch.cat, and unpack it in the model's forward"
    else:
        fix = "convert it with torch.tensor(values)"
    return (
        f"client {client}'s data set must return a tensor, an array or a number as the {what} of a sample, not "
        f"a {type(part).__name__}; {fix}"
    )


def explain_shapes(client: int, samples: Sequence[Sequence[object]]) -> str | None:
    """The error for samples that do not fit into one batch; None if their shapes are not the reason."""
    for what, parts in zip(("input", "target"), zip(*samples, strict=True), strict=True):
        shapes = {tuple(shape) for part in parts if (shape := getattr(part, "shape", None)) is not None}
        if len(shapes) > 1:
            shown = " and ".join(map(str, sorted(shapes)[:2]))
            return f"client {client}'s samples have {what}s of different shapes, such as {shown}; use one shape{_PAD}"
    return None


def _values(parts: Sequence[object] | Mapping[str, object]) -> Sequence[object]:
    return list(parts.values()) if isinstance(parts, Mapping) else list(parts)
