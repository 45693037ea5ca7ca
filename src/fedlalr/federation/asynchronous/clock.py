"""Which clients start, and which replies arrive, before each update of the server: a function of seed and speeds.

A client needs K / speed virtual seconds for its K local steps. The server updates its model when `buffer` replies have
arrived since the last update. `concurrency` clients train at the same time: when one replies, another one starts from
the current version. Replies that arrive at the same instant are received before anyone starts, so that clients of
equal speed and a buffer for all of them give synchronous rounds.

A client starts at most once from each version: (version, client) then identifies its batches and all its other random
numbers, as (round, client) does in a synchronous run. If nobody else is free, its place stays empty until the update.

Nothing here depends on what clients learn, so a resumed run replays the clock from the start.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlalr.data.random import STARTS, key
from fedlalr.federation.asynchronous.settings import Async
from fedlalr.federation.sampling import Kind, Sampler, draw_cohort
from fedlalr.training.interfaces import Training


class Flight(NamedTuple):
    """A client that trains. In the order of arrival; at one instant, older versions and lower ids come first."""

    arrives: float
    version: int
    """The number of updates before it started."""
    client: int


class Period(NamedTuple):
    """What happens between two updates."""

    started: Tensor
    """The clients that start from the version at its beginning, int64, ascending."""
    arrived: tuple[Flight, ...]
    """The replies of the update at its end; a fast client may reply twice, from two versions."""
    training: frozenset[int]
    """The clients that still train then."""
    seconds: float


class Clock:
    """The virtual clock of an asynchronous run."""

    def __init__(self, training: Training, sampling: Kind | Sampler, asynchronous: Async, speeds: Tensor) -> None:
        self._local, self._sampling, self._speeds = training, sampling, speeds
        self._buffer, self._concurrency = asynchronous.buffer, asynchronous.concurrency
        self._flights: list[Flight] = []  # a heap
        self._training: set[int] = set()
        self.now, self.version = 0.0, 0

    def advance(self) -> Period:
        """Move on to the next update."""
        began, waiting = self.now, self._sampled()
        started: list[int] = []
        arrived: list[Flight] = []
        while len(arrived) < self._buffer:
            if not (self._flights and self._flights[0].arrives <= self.now):
                started += self._start(waiting, {*started})
                self.now = self._flights[0].arrives
            arrived.append(heappop(self._flights))
            self._training.remove(arrived[-1].client)
        self.version += 1
        return Period(_ids(sorted(started)), tuple(arrived), frozenset(self._training), self.now - began)

    def _sampled(self) -> list[int]:
        """The clients sampled for the current version, in a random order."""
        seed, t = self._local.seed, self.version + 1
        self._random = np.random.Generator(np.random.Philox(key=key(seed, STARTS, t) % (1 << 64)))
        chosen = draw_cohort(self._sampling, self._local.clients.sizes, self._concurrency, seed, t)
        return self._random.permutation(chosen.numpy()).tolist()

    def _start(self, waiting: list[int], before: set[int]) -> list[int]:
        """Let free clients start until enough train; removes them from `waiting`. Returns them."""
        room = self._concurrency - len(self._training)
        if sum(client not in self._training for client in waiting) < room:
            others = np.setdiff1d(np.arange(len(self._speeds)), [*waiting, *before])
            waiting += self._random.permutation(others).tolist()
        chosen = [client for client in waiting if client not in self._training][:room]
        if chosen:
            waiting[:] = [client for client in waiting if client not in set(chosen)]
            ids = _ids(chosen)
            seconds = self._local.steps(self.version + 1, ids).double() / self._speeds[ids]
            for client, needed in zip(chosen, seconds.tolist(), strict=True):
                heappush(self._flights, Flight(self.now + needed, self.version, client))
            self._training.update(chosen)
        return chosen


def _ids(clients: list[int]) -> Tensor:
    return torch.tensor(clients, dtype=torch.int64, device="cpu")
