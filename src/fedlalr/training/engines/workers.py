"""The workers engine: processes that train clients in parallel on a CPU, over shared memory.

For models that are slow when stacked, especially convolutions. The processes are started once per run and get model,
loss and data once; after that they only receive the rows of the cohort to train, and weights never pass through a pipe.
Each runs the reference engine on one thread, so the result does not depend on their number.

They are started with plain `subprocess`, so scripts without a main guard, notebooks, standard input and pytest work.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import subprocess
import sys
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any, NoReturn

import cloudpickle
import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.common.interrupts import blocked
from fedlalr.training.engines.shared_memory import Arena, TooLarge, arranged, pickled_by_value, ship
from fedlalr.training.engines.worker_process import Orders, Setup, receive
from fedlalr.training.interfaces import Buffers, Replies, Trace, Training, Work, named
from fedlalr.training.machine import usable_cores

ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 25),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""glibc keeps the memory that a step freed, instead of returning it and requesting zeroed pages in the next step, and
asks for huge pages. What the environment already sets has priority."""

_AHEAD = 2
"""Clients that are assigned to a worker ahead of time, so that it never waits for the next."""


class CannotShip(ValueError):
    """The module, the loss or the data cannot be sent to another process."""


class WorkerDied(RuntimeError):
    """A worker process ended unexpectedly. The server's state is as it was before the round."""


@dataclass
class Process:
    """A worker as the run sees it."""

    popen: subprocess.Popen[bytes]
    connection: Connection[Any, Any]
    in_hand: deque[int] = field(default_factory=deque)
    settled: bool = False
    """Whether no message is pending in either direction; after an interruption some may be."""

    def end(self) -> None:
        self.connection.close()
        self.popen.kill()
        self.popen.wait()


_idle: list[Process] = []
"""Processes of finished runs, ready for the next run of this interpreter."""


os.register_at_fork(after_in_child=_idle.clear)  # they belong to the parent


@atexit.register
def end_idle_workers() -> None:
    """End the processes that wait for another run."""
    while _idle:
        _idle.pop().end()


class WorkersEngine:
    """Trains the cohort in several processes."""

    name = "workers"

    def __init__(self, training: Training, count: int | None = None, most: float = math.inf) -> None:
        """`most` limits the bytes of the copies for the processes."""
        if training.device.type != "cpu":
            raise ValueError(
                f"the workers engine trains on the CPU, not on {training.device}; use engine='stacked' there"
            )
        self.training = training
        self.count = count or usable_cores()
        self._processes: list[Process] = []
        self._arena = Arena.create(0)
        self._cohort = torch.empty(0, dtype=torch.int64, device="cpu")
        self._start(most)

    def train(self, work: Work) -> Replies:
        memory, orders = self._prepare(work)
        longest_first = self.training.steps(work.round, work.clients).argsort(descending=True, stable=True)
        return Replies.of(memory, work, self.training, *self._run(orders, longest_first.tolist()))

    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        work = Work(round, 0.0, clients, Slots(x=x), buffers, Slots(), len(clients), len(self.training.clients))
        memory, orders = self._prepare(work, recalibrate=True)
        errors, _ = self._run(orders, list(range(len(clients))))
        if errors:
            row, error = min(errors.items())
            raise RuntimeError(f"client {int(clients[row])} could not recalibrate its statistics: {error}")
        return {name: buffer.clone() for name, buffer in named(memory, "out_buffer:").items()}

    def close(self) -> None:
        """Keep idle processes for the next run; end those that died or are still busy."""
        for process in self._processes:
            if not process.settled or process.popen.poll() is not None:
                process.end()
            else:
                process.connection.send_bytes(pickle.dumps(None))
                _idle.append(process)
        self._processes = []
        self._arena.close()

    def _start(self, most: float) -> None:
        training = self.training
        own = (training.loss, training.algorithm, training.local, training.collate_fn)
        datasets = getattr(training.clients, "datasets", ())
        try:
            with pickled_by_value([training.model, *own, training.clients, *datasets]):
                arena, bounds = ship(training, most=most, readers=self.count)
        except TooLarge:
            raise CannotShip(
                f"copies of the clients' data for worker processes would take more than {most / 1e9:.2g} GB; keep "
                f"arrays in files that np.load(path, mmap_mode='r') opens, which the processes open for themselves, "
                f"or pass engine='workers' to copy them anyway"
            ) from None
        except Exception as error:
            raise _unsendable(f"{type(error).__name__}: {error}") from error
        setup: Setup = (bounds, [path or os.getcwd() for path in sys.path], torch.get_default_dtype())
        try:
            for _ in range(self.count):
                self._processes.append(_launch())
            for process in self._processes:
                self._send(process, pickle.dumps(setup), arena.descriptor)
            troubles = []
            for process in self._processes:
                troubles.append(self._receive(process))
                process.settled = True
            if any(troubles):
                raise _unsendable(next(filter(None, troubles)))
        except BaseException:
            self.close()
            raise
        finally:
            arena.close()

    def _prepare(self, work: Work, recalibrate: bool = False) -> tuple[dict[str, Tensor], Orders]:
        """Copy the round's tensors to shared memory."""
        sent = {
            f"{kind}:{name}": value
            for kind, values in (("down", work.broadcast), ("buffer", work.buffers), ("kept", work.kept))
            for name, value in values.items()
        }
        places, size = arranged(sent | Replies.memory(work, self.training, torch.device("meta")))
        fresh = self._arena.size < size
        if fresh:
            self._arena.close()
            self._arena = Arena.create(size)
        memory = self._arena.tensors(places)
        for name, value in sent.items():
            memory[name].copy_(value)
        bare = replace(work, broadcast=Slots(), buffers={}, kept=Slots())
        return memory, Orders(bare, places, recalibrate, fresh)

    def _run(self, orders: Orders, rows: list[int]) -> tuple[dict[int, str], list[Trace]]:
        """Train every row on the next free worker; returns the errors by row, and the traces."""
        with pickled_by_value([orders.work.probe]):
            message = cloudpickle.dumps(orders)
        self._cohort = orders.work.clients
        errors: dict[int, str] = {}
        traces: list[Trace] = []
        waiting = deque(rows)
        for process in self._processes:
            process.settled = False
            self._send(process, message, self._arena.descriptor if orders.fresh else None)
        for _ in range(_AHEAD):
            for process in self._processes:
                self._give(process, waiting)
        workers: dict[Any, Process] = {process.connection: process for process in self._processes}
        while any(process.in_hand for process in self._processes):
            for ready in wait(workers):
                process = workers[ready]
                row, error, seen = self._receive(process)
                process.in_hand.remove(row)
                traces += seen
                if error is not None:
                    errors[row] = error
                self._give(process, waiting)
        for process in self._processes:
            process.settled = True
        return errors, traces

    def _give(self, process: Process, waiting: deque[int]) -> None:
        if waiting:
            process.in_hand.append(waiting.popleft())
            self._send(process, pickle.dumps(process.in_hand[-1]))

    def _send(self, process: Process, message: bytes, descriptor: int | None = None) -> None:
        try:
            process.connection.send_bytes(message)
            if descriptor is not None:
                send_handle(process.connection, descriptor, process.popen.pid)
        except ConnectionError:
            self._raise_dead(process)

    def _receive(self, process: Process) -> Any:
        try:
            return receive(process.connection)
        except (EOFError, OSError):
            self._raise_dead(process)

    def _raise_dead(self, process: Process) -> NoReturn:
        code = process.popen.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        what = f" while it trained client {int(self._cohort[process.in_hand[0]])}" if process.in_hand else ""
        raise WorkerDied(f"worker process {process.popen.pid} {how}{what}; the state before the round is kept")


def _unsendable(trouble: object) -> CannotShip:
    return CannotShip(
        f"the run cannot be sent to worker processes ({trouble}); define what it uses at the top level of a module, "
        f"or use engine='reference'"
    )


def _launch() -> Process:
    """An idle process, or a new one."""
    while _idle:
        process = _idle.pop()
        if process.popen.poll() is None:
            process.settled = False
            return process
        process.end()
    ours, theirs = Pipe()
    environment = ALLOCATOR | os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with theirs, blocked():
        code = f"from fedlalr.training.engines.worker_process import main; main({theirs.fileno()})"
        popen = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL
        )
    return Process(popen, ours)
