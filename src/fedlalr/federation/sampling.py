"""Which clients take part in a round."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from fedlalr.common.checks import check_takes
from fedlalr.common.named import hint
from fedlalr.data.random import COHORT, key

Kind = Literal["uniform", "size", "round-robin"]
Sampler = Callable[[int, int, int, np.random.Generator], Sequence[int]]
"""A function of (round, number of clients, cohort size, generator) that returns the clients of a cohort. It must return
the same clients for the same arguments, so that a resumed run continues identically."""

ORDER = 0
"""Stands for the round in the seed of an order that is the same in all rounds, which are numbered from 1."""


def draw_cohort(sampling: Kind | Sampler, sizes: Tensor, count: int, seed: int | bytes, round: int) -> Tensor:
    """Exactly `count` different clients, ascending: a function of (seed, round). `sizes` are their numbers of samples.

    >>> [draw_cohort("round-robin", torch.ones(4), 2, seed=0, round=t).tolist() for t in (1, 2, 3)]
    [[0, 3], [1, 2], [0, 3]]
    """
    population = len(sizes)
    if callable(sampling):
        return _checked(sampling(round, population, count, generator(seed, round)), population, count, round)
    if sampling == "uniform" or count == population:
        return sample(population, count, seed, round)
    if sampling == "round-robin":
        turn = np.arange((round - 1) * count, round * count) % population
        chosen = generator(seed, ORDER).permutation(population)[turn]
    else:
        shares = sizes.double().numpy()
        chosen = generator(seed, round).choice(population, size=count, replace=False, p=shares / shares.sum())
    return torch.from_numpy(np.sort(chosen))


def sample(population: int, count: int, seed: int | bytes, round: int) -> Tensor:
    """Exactly `count` of the clients `0 … population − 1`, without replacement, ascending: a function of (seed, round).

    Anyone can compute the cohorts from an integer seed. If the seed is a secret (bytes), only its owner can: the
    cohorts of some rounds reveal nothing about those of others.

    >>> sample(10, 3, seed=0, round=1).tolist() == sample(10, 3, seed=0, round=1).tolist()
    True
    """
    if count == population:
        return torch.arange(population, device="cpu")
    return torch.from_numpy(np.sort(generator(seed, round).choice(population, size=count, replace=False)))


def poisson(population: int, count: int, seed: int | bytes, round: int) -> Tensor:
    """Each of the clients `0 … population − 1` independently with probability `count` / `population`, ascending: a
    function of (seed, round). There may be none.

    >>> [len(poisson(1000, 2, seed=0, round=t)) for t in (1, 2, 3, 4, 5, 6)]
    [1, 2, 3, 2, 0, 1]
    """
    if count == population:
        return torch.arange(population, device="cpu")
    return torch.from_numpy(np.flatnonzero(generator(seed, round).random(population) < count / population))


def generator(seed: int | bytes, round: int, stream: int = COHORT) -> np.random.Generator:
    """The generator of a round's cohort, or of the order in which its clients start."""
    if isinstance(seed, bytes):
        what = b"cohort of round %d" if stream == COHORT else b"starts of round %d"
        start = int.from_bytes(hmac.digest(seed, what % round, "sha256")[:16])  # Philox takes 128 bits
    else:
        start = key(seed, stream, round) % (1 << 64)
    return np.random.Generator(np.random.Philox(key=start))


def check_sampling(sampling: object) -> None:
    """Reject anything but a known name or a function."""
    if isinstance(sampling, str) and sampling not in get_args(Kind):
        names = ", ".join(map(repr, get_args(Kind)))
        raise ValueError(f"sampling must be {names} or a function, not {sampling!r}.{hint(sampling, get_args(Kind))}")
    if not isinstance(sampling, str) and not callable(sampling):
        raise TypeError(
            f"sampling must be a name or a function of (round, population, count, generator) that returns the clients "
            f"of a round, not {sampling!r}"
        )
    if callable(sampling):
        check_takes("sampling", sampling, "round", "population", "count", "generator")


def _checked(chosen: Any, population: int, count: int, round: int) -> Tensor:
    """What a caller's function returned, as a cohort."""
    where = f"the sampling function returned {chosen!r} in round {round}"
    try:
        clients = np.asarray(chosen)
    except ValueError:  # nested lists of different lengths
        clients = np.empty((0, 0))
    if clients.ndim != 1 or clients.dtype.kind not in "iu":
        raise TypeError(f"{where}; it must return {count} client numbers, such as a list of integers")
    if len(clients) != count:
        raise ValueError(f"{where}: {len(clients)} clients, but clients_per_round is {count}")
    if clients.min() < 0 or clients.max() >= population:
        raise ValueError(f"{where}, but clients are numbered from 0 to {population - 1}")
    if len(np.unique(clients)) != count:
        raise ValueError(f"{where}, but a client can take part only once in a round")
    return torch.from_numpy(np.sort(clients).astype(np.int64))
