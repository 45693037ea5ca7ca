"""A worker process: trains the clients it is assigned, in memory shared with the run."""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.common.interrupts import end_with_parent
from fedlalr.training.channels_last import in_channels_last
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.engines.shared_memory import Arena, Place, unship
from fedlalr.training.interfaces import Trace, Training, Work, named, reason_of, write_reply
from fedlalr.training.torch_state import copied

Setup = tuple[list[int], list[str], torch.dtype]
"""Sent to a worker at the start of a run, with the descriptor of an arena: where the pieces of the shipped `Training`
are in it, where to find modules, and the default dtype, for modules that create tensors."""


class Orders(NamedTuple):
    """Sent to a worker at the start of a round or a recalibration."""

    work: Work
    """Without the tensors, which are in the arena."""
    places: dict[str, Place]
    recalibrate: bool
    fresh: bool
    """Whether the arena is a new one, whose descriptor is sent along."""


Answer = tuple[int, str | None, list[Trace]]
"""The row of a client in the cohort, its error, if it raised, and its traces."""


def private_engine(training: Training) -> ReferenceEngine:
    """The engine of a worker, with a model of its own: its buffers must not be shared."""
    model = copied(training.model)
    inputs, _ = training.clients.batch(0, torch.arange(1, device="cpu"))
    if in_channels_last(model, inputs):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return ReferenceEngine(replace(training, model=model))


def answer(engine: ReferenceEngine, work: Work, memory: dict[str, Tensor], row: int, recalibrate: bool) -> Answer:
    """Train the client in one row of the cohort."""
    client, traces = int(work.clients[row]), list[Trace]()
    try:
        if recalibrate:
            write_reply(memory, row, {}, engine.statistics(work.buffers, client, work.round), {}, 0.0)
        else:
            write_reply(memory, row, *engine.train_client(work, row, client, traces))
    except Exception as error:  # fails only this client; the run records it
        return row, reason_of(error), traces
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
        engine, trouble = private_engine(unship(arena, bounds)), None
    except Exception as error:  # such as a class that cannot be imported here
        trouble = f"{type(error).__name__}: {error}"
    connection.send_bytes(pickle.dumps(trouble))
    while (message := receive(connection)) is not None:
        if isinstance(message, Orders):
            orders = message
            if orders.fresh:
                shared = Arena.open(recv_handle(connection))
            memory = shared.tensors(orders.places)
            broadcast, kept = (Slots(**named(memory, kind)) for kind in ("down:", "kept:"))
            work = replace(orders.work, broadcast=broadcast, buffers=named(memory, "buffer:"), kept=kept)
            if orders.recalibrate:
                engine.training.layout.load(engine.training.model, broadcast.x)
        else:
            connection.send_bytes(pickle.dumps(answer(engine, work, memory, message, orders.recalibrate)))
