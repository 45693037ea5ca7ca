"""Which clients start, and which replies arrive, before each update of the server: a function of seed and speeds.

A client needs K / speed virtual seconds for its K local steps. The server updates its model when `buffer` usable
replies have arrived since the last update. `concurrency` clients train at the same time: when one replies, another one
starts from the current version. Replies that arrive at the same instant are received before anyone starts, so that
clients of equal speed and a buffer for all of them give synchronous rounds.

A client starts at most once from each version: (version, client) then identifies its batches and all its other random
numbers, as (round, client) does in a synchronous run. If nobody else is free, its place stays empty until the update.

Of what clients learn, only the number of replies before each update matters here: those that cannot be used do not
count, and the server waits for others. A resumed run replays the clock from the start with these numbers.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlalr.data.random import STARTS
from fedlalr.federation.asynchronous.settings import Async
from fedlalr.federation.sampling import Kind, Sampler, draw_cohort, generator
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
        self.training, self._sampling, self._speeds = training, sampling, speeds
        self.asynchronous = asynchronous
        self._flights: list[Flight] = []  # a heap
        self._busy: set[int] = set()
        self.now, self.version = 0.0, -1
        self.more: dict[int, int] = {}
        """Version → replies beyond the buffer that the server waited for before it updated that version."""
        self.unusable: dict[tuple[int, int], str] = {}
        """(version, client) → why a reply cannot be used. Those that have arrived are forgotten in the next period:
        until then, an interrupted run may resume before this one."""

    def advance(self) -> Period:
        """Receive the first replies after an update, as many as the buffer takes."""
        self.version += 1
        in_flight = {(flight.version, flight.client) for flight in self._flights}
        self.unusable = {reply: reason for reply, reason in self.unusable.items() if reply in in_flight}
        local, how = self.training, self.asynchronous
        self._line = Line(self._sampling, local.clients.sizes, how.concurrency, local.seed, self.version + 1)
        self._began, self._started, self._arrived = self.now, list[int](), list[Flight]()
        return self._receive(how.buffer)

    def extend(self, count: int) -> Period:
        """The same period with this many more replies; with fewer if nobody trains and nobody is left to start."""
        before = len(self._arrived)
        longer = self._receive(count)
        self.more[self.version] = self.more.get(self.version, 0) + len(longer.arrived) - before
        return longer

    def replay(self, updates: int, more: Mapping[int, int]) -> None:
        """Move on to the end of the last of some updates."""
        for version in range(updates):
            self.advance()
            if version in more:
                self.extend(more[version])

    def _receive(self, count: int) -> Period:
        wanted = len(self._arrived) + count
        while len(self._arrived) < wanted:
            if not (self._flights and self._flights[0].arrives <= self.now):
                self._started += self._start()
                if not self._flights:
                    break
                self.now = self._flights[0].arrives
            self._arrived.append(heappop(self._flights))
            self._busy.remove(self._arrived[-1].client)
        started, arrived = _ids(sorted(self._started)), tuple(self._arrived)
        return Period(started, arrived, frozenset(self._busy), self.now - self._began)

    def _start(self) -> list[int]:
        """Let clients start until enough train; returns them."""
        chosen = self._line.take(self.asynchronous.concurrency - len(self._busy), self._busy)
        if chosen:
            ids = _ids(chosen)
            seconds = self.training.steps(self.version + 1, ids).double() / self._speeds[ids]
            for client, needed in zip(chosen, seconds.tolist(), strict=True):
                heappush(self._flights, Flight(self.now + needed, self.version, client))
            self._busy.update(chosen)
        return chosen


class Line:
    """The clients that may start from one version, in a random order: those sampled for it, then all others."""

    def __init__(self, sampling: Kind | Sampler, sizes: Tensor, concurrency: int, seed: int | bytes, t: int) -> None:
        self._random, self._population = generator(seed, t, STARTS), len(sizes)
        self._sampled = draw_cohort(sampling, sizes, concurrency, seed, t).numpy()
        self._waiting: list[int] = self._random.permutation(self._sampled).tolist()
        self._has_all = False

    def take(self, count: int, busy: Container[int]) -> list[int]:
        """The next clients that are not busy, at most `count`. None is taken twice."""
        if not self._has_all and sum(client not in busy for client in self._waiting) < count:
            others = np.setdiff1d(np.arange(self._population), self._sampled)
            self._waiting += self._random.permutation(others).tolist()
            self._has_all = True
        taken = [client for client in self._waiting if client not in busy][:count]
        gone = set(taken)
        self._waiting = [client for client in self._waiting if client not in gone]
        return taken


def _ids(clients: list[int]) -> Tensor:
    return torch.tensor(clients, dtype=torch.int64, device="cpu")
