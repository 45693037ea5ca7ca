"""A worker process: trains the clients it is assigned, in memory shared with the run."""

from __future__ import annotations

import pickle
import random
import socket
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlalr.algorithms.slots import Slots
from fedlalr.common.interrupts import end_with_parent
from fedlalr.data.random import MODULES, key
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.engines.shared_memory import Arena, Place, unship
from fedlalr.training.interfaces import Buffers, Trace, Training, Work
from fedlalr.training.torch_state import copied

_LENGTH = 8


@dataclass(frozen=True)
class Setup:
    """Sent to a worker at the start of a run."""

    bounds: list[int]
    """Where the pieces of the shipped `Training` are in the arena that is sent along."""
    path: list[str]
    """Where to find modules."""
    dtype: torch.dtype
    """The default dtype, for modules that create tensors."""


class Rest:
    """The run is over: release it and wait for the next one."""


@dataclass(frozen=True)
class Orders:
    """Sent to a worker at the start of a round or a recalibration."""

    work: Work
    """Without the tensors, which are in the arena."""
    places: dict[str, Place]
    recalibrate: bool = False


class Channel:
    """Sends messages, some with a file descriptor, over a socket."""

    def __init__(self, endpoint: socket.socket) -> None:
        self.endpoint = endpoint

    def send(self, message: object, descriptor: int | None = None) -> None:
        payload = message if isinstance(message, bytes) else pickle.dumps(message)
        head = len(payload).to_bytes(_LENGTH, "little")
        if descriptor is None:
            self.endpoint.sendall(head + payload)
        else:
            socket.send_fds(self.endpoint, [head], [descriptor])
            self.endpoint.sendall(payload)

    def receive(self) -> tuple[Any, int | None]:
        """The next message and its descriptor, if any; raises EOFError if the other side is gone."""
        head, descriptors, _, _ = socket.recv_fds(self.endpoint, _LENGTH, 1)
        head += self._exactly(_LENGTH - len(head)) if head else b""
        if not head:
            raise EOFError("the other side is gone")
        message = pickle.loads(self._exactly(int.from_bytes(head, "little")))
        return message, descriptors[0] if descriptors else None

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self.endpoint.recv(count - len(parts))
            if not part:
                raise EOFError("the other side disappeared in the middle of a message")
            parts += part
        return bytes(parts)


class Worker:
    """Carries out the orders of one run."""

    def __init__(self, training: Training) -> None:
        training = replace(training, model=copied(training.model))  # its buffers must not be shared
        self.training = training
        if any(isinstance(module, nn.Conv2d) for module in training.model.modules()):
            training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.engine = ReferenceEngine(training)
        self.arena: Arena | None = None
        self.orders: Orders | None = None
        self.memory: dict[str, Tensor] = {}
        self.work: Work | None = None

    def take(self, orders: Orders, descriptor: int | None) -> None:
        if descriptor is not None:
            self.arena = Arena.open(descriptor)
        assert self.arena is not None
        self.orders, self.memory = orders, self.arena.tensors(orders.places)
        self.work = replace(
            orders.work,
            broadcast=Slots(**part(self.memory, "down")),
            buffers=part(self.memory, "buffer"),
            kept=Slots(**part(self.memory, "kept")),
        )
        if orders.recalibrate:
            self.training.layout.load(self.training.model, self.work.broadcast.x)

    def answer(self, row: int) -> tuple[int, str | None, list[Trace]]:
        """Train the client in one row of the cohort; returns its error, if it raised, and its traces."""
        assert self.work is not None
        assert self.orders is not None
        client, traces = int(self.work.clients[row]), list[Trace]()
        draw = key(self.training.seed, MODULES, self.work.round, client)  # for data sets that use other generators
        random.seed(draw)
        np.random.seed(draw % 2**32)
        try:
            if self.orders.recalibrate:
                self._write(row, "out_buffer", self.engine.statistics(self.work.buffers, client, self.work.round))
            else:
                upload, buffers, kept, loss = self.engine.train_client(self.work, row, client, traces)
                self._write(row, "up", upload)
                self._write(row, "out_buffer", buffers)
                self._write(row, "out_kept", kept)
                self.memory["loss"][row] = loss
        except Exception as error:  # fails only this client; the run records it
            return row, f"{type(error).__name__}: {error}", traces
        return row, None, traces

    def _write(self, row: int, kind: str, values: Slots | Buffers) -> None:
        for name, value in values.items():
            self.memory[f"{kind}:{name}"][row] = value


def part(memory: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of one kind by name."""
    return {name.removeprefix(f"{kind}:"): tensor for name, tensor in memory.items() if name.startswith(f"{kind}:")}


def main(descriptor: int) -> None:
    """Serve the process at the other end of a socket."""
    end_with_parent(descriptor)
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        serve(channel)
    except (EOFError, ConnectionError):
        return


def _set_up(setup: Setup, descriptor: int) -> tuple[Worker | None, str | None]:
    """A worker for a run, or why there is none."""
    sys.path[:] = setup.path
    torch.set_default_dtype(setup.dtype)
    try:
        return Worker(unship(Arena.open(descriptor), setup.bounds)), None
    except Exception as error:  # such as a class that cannot be imported here
        return None, f"{type(error).__name__}: {error}"


def serve(channel: Channel) -> None:
    """Serve one run after another, until the process that started this one ends."""
    worker: Worker | None = None
    while True:
        message, descriptor = channel.receive()
        if isinstance(message, Setup):
            assert descriptor is not None
            worker, trouble = _set_up(message, descriptor)
            channel.send(trouble)
        elif isinstance(message, Rest):
            worker = None
        else:
            assert worker is not None
            if isinstance(message, Orders):
                worker.take(message, descriptor)
            else:
                channel.send(worker.answer(message))
