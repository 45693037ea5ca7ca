"""Partitions: which samples belong to which client.

`partition(labels, clients, scheme, ...)` distributes the samples of a data set over clients and returns a
`Partition`: two index arrays, however many clients there are. The schemes are in `schemes.py`; arguments are checked
here.

>>> parts = partition([0, 0, 1, 1, 2, 2], clients=3, scheme="iid", seed=1)
>>> len(parts), parts.sizes.tolist(), sorted(parts.indices.tolist())
(3, [2, 2, 2], [0, 1, 2, 3, 4, 5])
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlalr.common.checks import whole_number
from fedlalr.common.named import check_known
from fedlalr.data import schemes

Indices = NDArray[np.int64]

Scheme = Literal["dirichlet", "dirichlet-classes", "iid", "shards", "lognormal", "natural"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

_BY_CLASS = ("dirichlet", "dirichlet-classes", "shards")

_NOTHING = ("None", "nan", "<NA>", "NaT")

_READ_BY = {
    "min_size": ("dirichlet-classes", "lognormal"),
    "classes_per_client": ("shards",),
    "sigma": ("lognormal",),
    "ids": ("natural",),
}


@dataclass(frozen=True, eq=False)
class Partition(Sequence[Indices]):
    """The samples of every client, as one index array and the offsets where each client begins.

    `partition[i]` is a view of client i's samples, not a copy. A million clients take two arrays and no list.
    """

    indices: Indices
    """The samples of client 0, then those of client 1, and so on, `[n]`."""
    offsets: Indices
    """Client i holds `indices[offsets[i] : offsets[i + 1]]`, `[N + 1]`."""

    def __post_init__(self) -> None:
        for name in ("indices", "offsets"):
            whole = _whole_numbers(getattr(self, name), f"the {name} of a partition")
            object.__setattr__(self, name, whole)
        starts, n = self.offsets, len(self.indices)
        if not len(starts) or starts[0] != 0 or starts[-1] != n or (np.diff(starts) < 0).any():
            raise ValueError(f"the offsets of a partition must increase from 0 to the number of indices, {n}")

    @classmethod
    def from_owners(cls, owners: ArrayLike, clients: int) -> Partition:
        """From the client of every sample; a client's samples keep their order.

        >>> [part.tolist() for part in Partition.from_owners([1, 0, 1], clients=2)]
        [[1], [0, 2]]
        """
        fix = "; partition by names with fl.data.partition(labels, scheme='natural', ids=names)"
        owner = _whole_numbers(owners, "the owners of samples", fix)
        if owner.size and not 0 <= owner.min() <= owner.max() < clients:
            raise ValueError(f"the owners of samples must be clients 0 to {clients - 1}")
        sizes = np.bincount(owner, minlength=clients)
        return cls(np.argsort(owner, kind="stable"), np.concatenate([[0], np.cumsum(sizes)]))

    @classmethod
    def from_lists(cls, lists: Iterable[ArrayLike]) -> Partition:
        """From one list of sample indices per client, for a partition from elsewhere."""
        fix = "; convert a mask to indices with numpy.flatnonzero(mask)"
        parts = [_whole_numbers(part, f"the indices of client {i}", fix) for i, part in enumerate(lists)]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return cls(np.concatenate([np.empty(0, np.int64), *parts]), ends)

    @property
    def sizes(self) -> Indices:
        """The number of samples of every client, `[N]`."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, client: int) -> Indices: ...
    @overload
    def __getitem__(self, client: slice) -> Partition: ...
    def __getitem__(self, client: int | slice) -> Indices | Partition:
        if isinstance(client, slice):
            return Partition.from_lists(self[i] for i in range(*client.indices(len(self))))
        i = operator.index(client)
        if not -len(self) <= i < len(self):
            raise IndexError(f"there is no client {i}: the partition has {len(self)} clients, numbered from 0")
        i %= len(self)
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Partition):
            return NotImplemented
        return np.array_equal(self.indices, other.indices) and np.array_equal(self.offsets, other.offsets)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        sizes = self.sizes
        spread = f" of {sizes.min()} to {sizes.max()}" if len(sizes) else ""
        return f"Partition({len(self.indices)} samples, {len(self)} clients{spread})"


def partition(
    labels: ArrayLike,
    clients: int | None = None,
    scheme: str = "dirichlet",
    alpha: float = 0.3,
    seed: int = 0,
    *,
    min_size: int | None = None,
    classes_per_client: int | None = None,
    sigma: float | None = None,
    ids: ArrayLike | None = None,
) -> Partition:
    """Assign every sample to exactly one client; the same arguments give the same partition.

    labels: the class of every sample, integers `[n]` (an array, a CPU tensor or a list). The schemes `iid`, `lognormal`
        and `natural` only count them, so they accept targets of any kind.
    clients: the number of clients, 100 by default; with `natural` the number of distinct ids.
    scheme: `dirichlet`: equal sizes, every client with its own class prior from Dir(alpha), as in FedDyn.
        `dirichlet-classes`: every class divided over the clients by a draw from Dir(alpha), sizes unequal.
        `iid`: equal sizes, no skew. `shards`: every client gets `classes_per_client` classes (2 by default).
        `lognormal`: no label skew, sizes in the proportions of a log-normal with `sigma` (1.0 by default).
        `natural`: one client for each distinct value of `ids`, in sorted order.
    alpha: the concentration, for the two Dirichlet schemes; smaller is more skewed.
    min_size: the least number of samples per client (1 by default), for `dirichlet-classes` and `lognormal`.
    """
    check_known("there is no partition scheme", scheme, SCHEMES)
    _check_unread(scheme, min_size=min_size, classes_per_client=classes_per_client, sigma=sigma, ids=ids)
    classes = _classes(labels) if scheme in _BY_CLASS else np.zeros(_count(labels), np.int64)
    if scheme == "natural":
        return _natural(len(classes), clients, ids)
    clients = 100 if clients is None else whole_number("clients", clients)
    alpha = _number("alpha", alpha, least=1e-100)
    if clients > len(classes):
        raise ValueError(
            f"{clients} clients cannot share {len(classes)} samples: every client needs at least one; use fewer clients"
        )
    rng = np.random.default_rng(whole_number("seed", seed, least=0, most=None))
    if scheme == "dirichlet":
        owner = schemes.dirichlet(classes, clients, alpha, rng)
    elif scheme == "dirichlet-classes":
        least = _min_size(min_size, clients, len(classes))
        owner = schemes.dirichlet_classes(classes, clients, alpha, least, rng)
    elif scheme == "iid":
        owner = schemes.iid(classes, clients, rng)
    elif scheme == "shards":
        k = 2 if classes_per_client is None else whole_number("classes_per_client", classes_per_client)
        owner = schemes.shards(classes, clients, k, rng)
    else:
        least = _min_size(min_size, clients, len(classes))
        spread = 1.0 if sigma is None else _number("sigma", sigma, least=0.0)
        owner = schemes.lognormal(classes, clients, spread, least, rng)
    return Partition.from_owners(owner, clients)


def _whole_numbers(values: ArrayLike, what: str, fix: str = "") -> Indices:
    """Reject values that NumPy would silently convert to integers."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"{what} must be whole numbers in one dimension, not {_describe(array)}{fix}")
    return array.astype(np.int64, copy=False)


def _natural(n: int, clients: int | None, ids: ArrayLike | None) -> Partition:
    if ids is None:
        raise ValueError("the scheme 'natural' needs ids: the owner of each sample, one value per sample")
    values = np.asarray(ids)
    if values.shape != (n,):
        raise ValueError(f"ids must have one value for each of the {n} samples, not {_describe(values)}")
    # NumPy turns a NaN in a list of names into a name
    missing = _missing(values if values.dtype.kind != "U" else np.asarray(ids, dtype=object))
    if len(missing):
        raise ValueError(f"ids has no value for sample {missing[0]} ({len(missing)} in total); leave such samples out")
    try:
        names, owner = np.unique(values, return_inverse=True)
    except TypeError as error:
        raise TypeError(f"ids must be all of one kind, such as all strings: {error}") from error
    if clients is not None and clients != len(names):
        raise ValueError(
            f"the scheme 'natural' makes one client per id and there are {len(names)} ids, not {clients!r}; "
            f"leave clients out"
        )
    return Partition.from_owners(owner, len(names))


def _missing(values: NDArray[Any]) -> Sequence[int]:
    """The positions of None, NaN and pandas' own values for an empty cell."""
    if values.dtype != object:
        return np.flatnonzero(values != values).tolist()
    return [i for i, value in enumerate(values) if not isinstance(value, str) and str(value) in _NOTHING]


def _check_unread(scheme: str, **options: object) -> None:
    """Reject an option that the scheme would ignore."""
    for name, value in options.items():
        if value is not None and scheme not in _READ_BY[name]:
            readers = " and ".join(map(repr, _READ_BY[name]))
            raise ValueError(f"{name} is not used by the scheme {scheme!r}, only by {readers}; leave it out")


def _classes(labels: ArrayLike) -> Indices:
    """Labels renumbered as 0 … K−1 without gaps."""
    array = np.asarray(labels)
    _count(array)
    if array.ndim != 1 or array.dtype.kind not in "iub":
        named = array.ndim == 1 and array.dtype.kind in "UOT"
        number = "convert names to numbers with numpy.unique(labels, return_inverse=True)[1]"
        fix = number if named else "the schemes 'iid', 'lognormal' and 'natural' accept any targets"
        found = _describe(array)
        raise TypeError(f"labels must be whole numbers in one dimension, one per sample, not {found}; {fix}")
    return np.unique(array, return_inverse=True)[1].astype(np.int64)


def _count(labels: ArrayLike) -> int:
    array = np.asarray(labels)
    if not array.size:  # NumPy turns an empty list into an array of floats
        raise ValueError("labels is empty: there are no samples to partition")
    if not array.ndim:
        raise TypeError(f"labels must have one value per sample, not {labels!r}")
    return len(array)


def _min_size(min_size: int | None, clients: int, n: int) -> int:
    least = 1 if min_size is None else whole_number("min_size", min_size, least=0)
    if least * clients > n:
        raise ValueError(
            f"{n} samples are too few for {clients} clients with min_size={least}; use at most min_size={n // clients}"
        )
    return least


def _number(name: str, value: Any, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{name} must be a number, not {value!r}")
    number = float(value)
    if not math.isfinite(number) or number < least:
        raise ValueError(f"{name} must be a finite number of at least {least:g}, not {value!r}")
    return number


def _describe(array: NDArray[Any]) -> str:
    return f"an array of shape {array.shape} and type {array.dtype}"
