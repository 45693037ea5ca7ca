"""A worker process: trains the clients it is assigned, in memory shared with the run."""

from __future__ import annotations

import pickle
import random
import sys
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlalr.algorithms.slots import Slots
from fedlalr.common.interrupts import end_with_parent
from fedlalr.data.random import MODULES, key
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.engines.shared_memory import Arena, Place, unship
from fedlalr.training.interfaces import Trace, Training, Work, named, write_reply
from fedlalr.training.torch_state import copied

Setup = tuple[list[int], list[str], torch.dtype]
"""Sent to a worker at the start of a run, with the descriptor of an arena: where the pieces of the shipped `Training`
are in it, where to find modules, and the default dtype, for modules that create tensors."""


@dataclass(frozen=True)
class Orders:
    """Sent to a worker at the start of a round or a recalibration."""

    work: Work
    """Without the tensors, which are in the arena."""
    places: dict[str, Place]
    recalibrate: bool
    fresh: bool
    """Whether the arena is a new one, whose descriptor is sent along."""


Answer = tuple[int, str | None, list[Trace]]
"""The row of a client in the cohort, its error, if it raised, and its traces."""


class Worker:
    """Carries out the orders of one run."""

    arena: Arena
    orders: Orders
    work: Work
    memory: dict[str, Tensor]

    def __init__(self, training: Training) -> None:
        self.training = replace(training, model=copied(training.model))  # its buffers must not be shared
        if any(isinstance(module, nn.Conv2d) for module in training.model.modules()):
            self.training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.engine = ReferenceEngine(self.training)

    def take(self, orders: Orders) -> None:
        self.orders, self.memory = orders, self.arena.tensors(orders.places)
        self.work = replace(
            orders.work,
            broadcast=Slots(**named(self.memory, "down:")),
            buffers=named(self.memory, "buffer:"),
            kept=Slots(**named(self.memory, "kept:")),
        )
        if orders.recalibrate:
            self.training.layout.load(self.training.model, self.work.broadcast.x)

    def answer(self, row: int) -> Answer:
        """Train the client in one row of the cohort."""
        client, traces = int(self.work.clients[row]), list[Trace]()
        draw = key(self.training.seed, MODULES, self.work.round, client)  # for data sets that use other generators
        random.seed(draw)
        np.random.seed(draw % 2**32)
        try:
            if self.orders.recalibrate:
                buffers = self.engine.statistics(self.work.buffers, client, self.work.round)
                write_reply(self.memory, row, {}, buffers, {}, 0.0)
            else:
                write_reply(self.memory, row, *self.engine.train_client(self.work, row, client, traces))
        except Exception as error:  # fails only this client; the run records it
            return row, f"{type(error).__name__}: {error}", traces
        return row, None, traces


def receive(connection: Connection[Any, Any]) -> Any:
    """The next message."""
    return pickle.loads(connection.recv_bytes())


def main(descriptor: int) -> None:
    """Serve one run after another, until the process at the other end of a socket ends."""
    end_with_parent(descriptor)
    torch.set_num_threads(1)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        while True:
            serve_run(connection)
    except (EOFError, ConnectionError):
        return


def serve_run(connection: Connection[Any, Any]) -> None:
    """Serve a run: after its setup, orders and the rows to train, until None."""
    setup: Setup = receive(connection)
    bounds, sys.path[:], dtype = setup
    arena = Arena.open(recv_handle(connection))
    torch.set_default_dtype(dtype)
    try:
        worker, trouble = Worker(unship(arena, bounds)), None
    except Exception as error:  # such as a class that cannot be imported here
        trouble = f"{type(error).__name__}: {error}"
    connection.send_bytes(pickle.dumps(trouble))
    while (message := receive(connection)) is not None:
        if isinstance(message, Orders):
            if message.fresh:
                worker.arena = Arena.open(recv_handle(connection))
            worker.take(message)
        else:
            connection.send_bytes(pickle.dumps(worker.answer(message)))
