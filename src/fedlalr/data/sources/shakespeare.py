"""Shakespeare as LEAF makes it: a client is a speaking role, a sample is 80 characters and the one that follows.

A role's windows are split in time order: a training part, a gap of 79 windows so that no test window overlaps a
training window, and a test part. Our experiments crop this to 100 roles with 2,000 training and 400 test windows each,
as the FedDyn code base does; the paper states no numbers.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlalr.data.random import bits, key
from fedlalr.data.sources.rawdata import RawData
from fedlalr.data.sources.text_by_role import LENGTH, Roles, Script
from fedlalr.data.sources.vocabulary import CHARACTERS
from fedlalr.data.windows import Windows

GAP: Final = LENGTH - 1
_STREAM: Final = 101  # a stream of random bits, separate from those of batches and augmentation
_CHOOSE, _TRAIN, _TEST, _DEAL, _DEAL_TEST = range(5)


class Split(NamedTuple):
    """The windows of every role, by their starts in `characters`, for training and for testing."""

    characters: NDArray[np.uint8]
    train: tuple[NDArray[np.int64], ...]
    test: tuple[NDArray[np.int64], ...]
    names: tuple[str, ...]


def split(script: Script, train_fraction: float = 0.8) -> Split:
    """Split every role's windows in time order. A test part that came with the text is kept."""
    if script.test is not None:
        return _given(script.roles, script.test)
    if not 0 < train_fraction < 1:
        raise ValueError(
            f"train_fraction, the share of a role's windows to train on, must lie between 0 and 1, not {train_fraction}"
        )
    each = [script.roles.starts(role) for role in range(len(script.roles.names))]
    train = tuple(starts[: int(train_fraction * len(starts))] for starts in each)
    test = tuple(starts[len(first) + GAP :] for starts, first in zip(each, train, strict=True))
    return Split(script.roles.characters, train, test, script.roles.names)


def federation(
    script: Script,
    *,
    roles: int | None = 100,
    train: int | None = 2000,
    test: int | None = 400,
    iid: bool = False,
    seed: int = 0,
    train_fraction: float = 0.8,
    sequence: bool = False,
    validation: float = 0.0,
    source: str = "",
) -> RawData:
    """A federation of roles with equal numbers of windows.

    `roles` are drawn from those with more than `train` training and at least `test` test windows; each contributes a
    stretch of consecutive windows at a position drawn from the seed. None takes all. `iid` pools the same windows,
    shuffles them and splits them evenly. `sequence` keeps every 80th window, so that they do not overlap, with a target
    at each of its 80 positions: about as many characters are predicted, each of them once. `validation` replaces the
    test windows by the last share of each role's training windows, without those that overlap the rest.
    """
    for option, value in (("roles", roles), ("train", train), ("test", test)):
        if value is not None and value < 1:
            raise ValueError(f"{option} must be at least 1, or None for all, not {value}")
    parts = split(script, train_fraction)
    chosen = _choose(parts, roles, train, test, seed)
    train_starts = [_stretch(parts.train[role], train, seed, _TRAIN, role) for role in chosen]
    test_starts = [_stretch(parts.test[role], test, seed, _TEST, role) for role in chosen]
    if validation:
        train_starts, test_starts = _hold_out(train_starts, validation)
    if sequence:
        train_starts, test_starts = ([part[::LENGTH] for part in starts] for starts in (train_starts, test_starts))
    characters = torch.from_numpy(parts.characters)
    inputs, groups = _pool(characters, train_starts)
    test_inputs, test_groups = _pool(characters, test_starts)
    if iid:
        groups = groups[_shuffled(len(groups), seed, _DEAL)]
        test_groups = test_groups[_shuffled(len(test_groups), seed, _DEAL_TEST)]
    return RawData(
        name="shakespeare",
        inputs=inputs,
        targets=_next_characters(inputs) if sequence else inputs.following(),
        test_inputs=test_inputs,
        test_targets=_next_characters(test_inputs) if sequence else test_inputs.following(),
        classes=len(CHARACTERS),
        groups=groups,
        test_groups=test_groups,
        source=source,
        class_names=tuple(CHARACTERS),
        group_names=tuple(f"client {i}" for i in range(len(chosen)))
        if iid
        else tuple(parts.names[role] for role in chosen),
    )


def _given(train: Roles, test: Roles) -> Split:
    """A split that came with the text. Roles are matched by name."""
    places = {name: role for role, name in enumerate(test.names)}
    shift = len(train.characters)
    return Split(
        np.concatenate([train.characters, test.characters]),
        tuple(train.starts(role) for role in range(len(train.names))),
        tuple(test.starts(places[name]) + shift if name in places else np.empty(0, np.int64) for name in train.names),
        train.names,
    )


def _choose(parts: Split, roles: int | None, train: int | None, test: int | None, seed: int) -> list[int]:
    """Roles with enough windows: all, or the requested number, drawn without replacement, in the order of the text."""
    enough = [
        role
        for role in range(len(parts.names))
        if len(parts.train[role]) > (train or 0) and len(parts.test[role]) >= (test or 1)
    ]
    if roles is None:
        return enough
    if len(enough) < roles:
        raise ValueError(
            f"{roles} roles were requested, but only {len(enough)} of {len(parts.names)} have more than {train or 0} "
            f"training and at least {test or 1} test windows; request fewer roles or shorter stretches"
        )
    order = _shuffled(len(enough), seed, _CHOOSE)[:roles]
    return sorted(enough[i] for i in order.tolist())


def _stretch(starts: NDArray[np.int64], length: int | None, seed: int, stream: int, role: int) -> NDArray[np.int64]:
    if length is None:
        return starts
    places = len(starts) - length + 1
    first = int(bits(key(seed, _STREAM, stream), torch.tensor([role]))) % places
    return starts[first : first + length]


def _hold_out(stretches: list[NDArray[np.int64]], share: float) -> tuple[list[NDArray[np.int64]], ...]:
    """The windows of every role that are left for training, and the held-out ones: the last of each role."""
    cuts = [len(starts) - round(share * len(starts)) for starts in stretches]
    train = [starts[:cut] for starts, cut in zip(stretches, cuts, strict=True)]
    held_out = [starts[cut + GAP :] for starts, cut in zip(stretches, cuts, strict=True)]
    if not all(map(len, train)) or not any(map(len, held_out)):
        raise ValueError(
            f"validation={share!r} leaves no windows to hold out, or a role none to train on: {GAP} windows between "
            f"the two parts are dropped, and the roles have {min(map(len, stretches)):,} or more; change the share, or "
            f"give them more windows"
        )
    return train, held_out


def _pool(characters: Tensor, starts: list[NDArray[np.int64]]) -> tuple[Windows, Tensor]:
    """All windows, role by role, and the role of each."""
    sizes = torch.tensor([len(part) for part in starts], dtype=torch.int64)
    groups = torch.repeat_interleave(torch.arange(len(starts)), sizes)
    joined = np.concatenate([np.empty(0, np.int64), *starts])
    return Windows(characters, torch.from_numpy(joined), LENGTH), groups


def _next_characters(windows: Windows) -> Tensor:
    """The character after each position of every window, int64 `[n, length]`."""
    return Windows(windows.characters, windows.starts + 1, windows.length)[:]


def _shuffled(n: int, seed: int, stream: int) -> Tensor:
    """A permutation of 0 … n−1, the same on every machine."""
    return torch.argsort(bits(key(seed, _STREAM, stream), torch.arange(n)), stable=True)
