"""What to do about clients that a run cannot read: a sentence for each form in which people keep data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, ValuesView

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedlalr.data.partition import Partition

_WANTED = "every client must be a pair of tensors (inputs, targets), or every client a torch Dataset with a length"
_PAD = (
    "; sequences of several lengths are padded to one, torch.nn.functional.pad(sequence, (0, length - len(sequence)))"
)


def check_rows(whose: str, inputs: object, targets: object) -> None:
    """Refuse tensors of which no samples can be picked, one for each place along the first dimension."""
    for what, values in (("inputs", inputs), ("targets", targets)):
        if not isinstance(values, Tensor):
            continue
        if values.is_nested:
            form = f"a nested tensor; give all samples one length, torch.nested.to_padded_tensor({what}, 0)"
        elif values.layout != torch.strided:
            form = f"a sparse tensor; make it dense, {what}.to_dense()"
        elif values.dim() == 0:
            form = f"a single number; of one sample make a batch of one, {what}.unsqueeze(0)"
        else:
            continue
        raise TypeError(f"{whose} {what} are {form}")


def told_clients(clients: object) -> str:
    """Of what is no sequence of clients."""
    if isinstance(clients, Mapping):
        mend = "; pass its values, list(clients.values())"
    elif isinstance(clients, Iterator | ValuesView):
        mend = "; make a list of it, list(clients)"
    elif isinstance(clients, Partition):
        mend = "; pass it with its samples, fl.data.Population(inputs, targets, partition)"
    elif isinstance(clients, tuple | list):
        mend = " of the inputs and targets of all; fl.data.partition(targets, clients=10) deals them to clients"
    elif isinstance(clients, Dataset):
        mend = "; of one data set make several, such as by torch.utils.data.random_split(dataset, [0.1] * 10)"
    else:
        mend = ""
    return (
        f"clients must be a sequence of (inputs, targets) tensors or torch Datasets, or what fl.data.load returns, "
        f"not {type(clients).__name__}{mend}"
    )


def told_client(number: int, client: object) -> str:
    """Of one client that is neither a pair of tensors nor a data set."""
    parts = list(client) if isinstance(client, tuple | list) else [client]
    if any(isinstance(part, np.ndarray) for part in parts):
        return f"client {number} is made of NumPy arrays; make them tensors by torch.from_numpy(array)"
    if any(type(part).__module__.partition(".")[0] == "pandas" for part in parts):
        return (
            f"client {number} is made of pandas' tables; make them tensors, inputs by "
            f"torch.tensor(table.to_numpy(), dtype=torch.float32) and labels by torch.tensor(column.to_numpy())"
        )
    if isinstance(client, DataLoader):
        return f"client {number} is a DataLoader; pass its data set, loader.dataset: the run makes the batches"
    return f"client {number} is {_form(client)}; {_WANTED}{_mend(client)}"


def _form(client: object) -> str:
    if isinstance(client, tuple | list) and len(client) == 2:
        return f"a pair of {' and '.join(type(part).__name__ for part in client)}"
    if isinstance(client, tuple | list):
        return f"a {type(client).__name__} of {len(client)}"
    kind = type(client)
    return f"a {kind.__module__.partition('.')[0]}.Dataset" if kind.__name__ == "Dataset" else f"a {kind.__name__}"


def _mend(client: object) -> str:
    if isinstance(client, tuple | list) and len(client) == 2:
        return ". Make tensors of lists by torch.tensor(values) or torch.stack(samples)" + _PAD
    if isinstance(client, list) and client and isinstance(client[0], tuple | list) and len(client[0]) == 2:
        return (
            ". Of a list of samples make the pair (torch.stack([input for input, _ in samples]), "
            "torch.tensor([target for _, target in samples]))"
        )
    if isinstance(client, Dataset):
        return ". Read the samples of a stream into tensors first"
    if hasattr(client, "__getitem__") and hasattr(client, "__len__") and not isinstance(client, Sequence | Mapping):
        return ". Wrap it in a class Own(torch.utils.data.Dataset) whose __getitem__ returns (input, target)"
    return ""


def told_sample(client: int, sample: object) -> str:
    """Of a data set that gives something else than (input, target) for a sample."""
    start = f"client {client}'s data set must give (input, target) for a sample, not "
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
            f"{start}{len(sample)} things; several inputs are packed into one tensor, by torch.stack or torch.cat, "
            f"and taken apart in the model's forward"
        )
    return f"{start}a {type(sample).__name__}"


def told_part(client: int, what: str, part: object) -> str:
    """Of an input or target of a sample that is no tensor, array or number."""
    if isinstance(part, str):
        mend = "make numbers of words, such as their places in a vocabulary"
    elif isinstance(part, tuple | list | Mapping) and any(isinstance(one, Tensor) for one in _values(part)):
        mend = "pack several tensors into one, by torch.stack or torch.cat, and take it apart in the model's forward"
    else:
        mend = "make one of it by torch.tensor(values)"
    return (
        f"client {client}'s data set must give a tensor, an array or a number as {what} of a sample, not "
        f"a {type(part).__name__}; {mend}"
    )


def told_shapes(client: int, samples: Sequence[Sequence[object]]) -> str | None:
    """Of samples that cannot be put into one batch; None where their shapes are not the reason."""
    for what, parts in zip(("input", "target"), zip(*samples, strict=True), strict=True):
        shapes = {tuple(shape) for part in parts if (shape := getattr(part, "shape", None)) is not None}
        if len(shapes) > 1:
            shown = " and ".join(map(str, sorted(shapes)[:2]))
            return f"client {client}'s samples have {what}s of different shapes, such as {shown}; give all one{_PAD}"
    return None


def _values(parts: Sequence[object] | Mapping[str, object]) -> Sequence[object]:
    return list(parts.values()) if isinstance(parts, Mapping) else list(parts)
