"""`fl.data.load`: a data set by name, partitioned over clients and ready for `fl.run`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlalr.common.named import nearest
from fedlalr.data.partition import Partition, partition
from fedlalr.data.population import Population, Samples
from fedlalr.data.random import bits, key
from fedlalr.data.transforms import STATISTICS, FlipCrop, Normalize, Transform

_AUGMENTED = ("cifar10", "cifar100")
_PARTITION_OPTIONS = ("min_size", "classes_per_client", "sigma")
_VALIDATION = 102
"""A separate stream of random bits."""


def load(
    name: str,
    clients: int | None = 100,
    scheme: str = "dirichlet",
    alpha: float = 0.3,
    seed: int = 0,
    augment: bool = True,
    folder: str | Path | None = None,
    validation: float = 0.0,
    **options: Any,
) -> Population:
    """A data set as a population of clients, with its test set and its transform.

    name: `digits` (no download), `fashion`, `mnist`, `cifar10`, `cifar100` or `shakespeare`.
    clients, scheme, alpha, seed: as in `fl.data.partition`. With `scheme="natural"` clients are Shakespeare's roles.
    augment: flip and crop CIFAR's training images; the other data sets have no augmentation.
    folder: the data set in its original format; without it, the cache is read, or filled by a download.
    validation: the share of the training samples to hold out; they then replace the test set. They are drawn at
        random, but of a text the last windows of each role are held out, as windows drawn at random would overlap.
    options: more options of the partition (`min_size`, `classes_per_client`, `sigma`) or of the data set.

    >>> load("digits", clients=10)
    Population(digits: 10 clients, 1442 samples)
    """
    from fedlalr.data.sources import raw

    dealing = {option: options.pop(option) for option in _PARTITION_OPTIONS if option in options}
    _reject_misspelt(options)
    if not 0 <= validation < 1:
        raise ValueError(
            f"validation is the share of the training samples to hold out, from 0 up to 1, not {validation!r}"
        )
    if name == "shakespeare":
        roles = {"roles": clients} if scheme in ("natural", "iid") else {}
        options = {"seed": seed, "validation": validation, **roles, **options}
        validation = 0.0
    found = raw(name, folder=folder, **options)
    if scheme == "natural":
        if found.groups is None:
            raise ValueError(
                f"{name} does not record the owners of samples, so there is no natural partition; choose another scheme"
            )
        dealing["ids"] = found.groups.numpy()
        clients = None
    train, held_out = _hold_out(len(found.targets), validation, seed)
    if "ids" in dealing:
        dealing["ids"] = dealing["ids"][train]
    labels = found.targets if found.targets.dim() == 1 else found.targets[:, -1]  # of a sequence, the last
    dealt = partition(labels.numpy()[train], clients, scheme, alpha, seed, **dealing)
    test: tuple[Samples, Tensor] = (found.test_inputs, found.test_targets)
    if len(held_out):
        rows = torch.from_numpy(held_out)
        test = (found.inputs[rows], found.targets[rows])
    return Population(
        found.inputs,
        found.targets,
        Partition(train[dealt.indices], dealt.offsets),
        transform=_transform(name, augment),
        test=test,
        classes=found.classes,
        name=name,
    )


def _reject_misspelt(options: Mapping[str, object]) -> None:
    """Reject misspelt options of `load` or of a partition; the data set checks the rest."""
    named = [option for option in inspect.signature(load).parameters if option != "options"]
    for option in options:
        near = nearest(option, [*named, *_PARTITION_OPTIONS], cutoff=0.75)
        if near:
            raise TypeError(f"there is no option {option!r}; did you mean {near!r}?")


def _hold_out(count: int, share: float, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The indices of the training and the held-out samples, both ascending: a function of the seed."""
    order = torch.argsort(bits(key(seed, _VALIDATION), torch.arange(count)), stable=True).numpy()
    cut = round(share * count)
    if cut == count:
        raise ValueError(f"validation={share!r} holds out all {count:,} training samples; leave some to train on")
    if share and not cut:
        raise ValueError(f"validation={share!r} holds out none of {count:,} training samples; hold out more, or use 0")
    return np.sort(order[cut:]), np.sort(order[:cut])


def _transform(name: str, augment: bool) -> Transform | None:
    if name not in STATISTICS:
        return None
    mean, std = STATISTICS[name]
    return FlipCrop(mean, std) if augment and name in _AUGMENTED else Normalize(mean, std)
