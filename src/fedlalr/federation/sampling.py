"""Which clients take part in a round."""

from __future__ import annotations

import hmac

import numpy as np
import torch
from torch import Tensor

from fedlalr.data.random import COHORT, key


def sample(population: int, count: int, seed: int | bytes, round: int) -> Tensor:
    """Exactly `count` of the clients `0 … population − 1`, without replacement, ascending: a function of (seed, round).

    Anyone can compute the cohorts from an integer seed. If the seed is a secret (bytes), only its owner can: the
    cohorts of some rounds reveal nothing about those of others.

    >>> sample(10, 3, seed=0, round=1).tolist() == sample(10, 3, seed=0, round=1).tolist()
    True
    """
    if count == population:
        return torch.arange(population, device="cpu")
    if isinstance(seed, bytes):
        start = int.from_bytes(hmac.digest(seed, b"cohort of round %d" % round, "sha256")[:16])  # Philox takes 128 bits
    else:
        start = key(seed, COHORT, round) % (1 << 64)
    generator = np.random.Generator(np.random.Philox(key=start))
    return torch.from_numpy(np.sort(generator.choice(population, size=count, replace=False)))
