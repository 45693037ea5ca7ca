"""Which clients take part in a round."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedlalr.data.random import COHORT, key


def sample(population: int, count: int, seed: int, round: int) -> Tensor:
    """Exactly `count` of the clients `0 … population − 1`, without replacement, ascending: a function of (seed, round).

    >>> sample(10, 3, seed=0, round=1).tolist() == sample(10, 3, seed=0, round=1).tolist()
    True
    """
    if count == population:
        return torch.arange(population, device="cpu")
    generator = np.random.Generator(np.random.Philox(key=key(seed, COHORT, round) % (1 << 64)))
    return torch.from_numpy(np.sort(generator.choice(population, size=count, replace=False)))
