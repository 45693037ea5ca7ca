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
import selectors
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn, cast

import cloudpickle
import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.common.interrupts import blocked
from fedlalr.training.engines.shared_memory import Arena, SharedMemoryPlan, TooLarge, ship, unimportable_modules
from fedlalr.training.engines.worker_process import Channel, Orders, Rest, Setup, part
from fedlalr.training.interfaces import Buffers, Replies, Trace, Training, Work
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
    channel: Channel
    in_hand: deque[int] = field(default_factory=deque)
    settled: bool = False
    """Whether no message is pending in either direction; after an interruption some may be."""

    def end(self) -> None:
        self.channel.endpoint.close()
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
        self._arena: Arena | None = None
        self._cohort = torch.empty(0, dtype=torch.int64, device="cpu")
        self._start(most)

    def train(self, work: Work) -> Replies:
        memory, orders, descriptor = self._prepare(work)
        steps = self.training.steps(work.round, work.clients)
        errors, traces = self._run(orders, descriptor, (-steps).argsort(stable=True).tolist())
        good = [row for row in range(len(work.clients)) if row not in errors]
        replies = Replies(
            clients=work.clients,
            samples=self.training.clients.sizes[work.clients],
            steps=steps,
            losses=memory["loss"].clone(),
            slots=Slots(**part(memory, "up")),
            buffers={name: buffer.clone() for name, buffer in part(memory, "out_buffer").items()},
            kept=Slots(**part(memory, "out_kept")),
            failures={int(work.clients[row]): error for row, error in sorted(errors.items())},
            traces=tuple(sorted(traces, key=lambda trace: (trace.client, trace.step))),
        )
        return replies.rows(torch.tensor(good, dtype=torch.int64, device="cpu")) if errors else replies

    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        work = Work(round, 0.0, clients, Slots(x=x), buffers, Slots(), len(clients), len(self.training.clients))
        memory, orders, descriptor = self._prepare(work, recalibrate=True)
        errors, _ = self._run(orders, descriptor, list(range(len(clients))))
        if errors:
            row, error = min(errors.items())
            raise RuntimeError(f"client {int(clients[row])} could not recalibrate its statistics: {error}")
        return {name: buffer.clone() for name, buffer in part(memory, "out_buffer").items()}

    def close(self) -> None:
        """Keep idle processes for the next run; end those that died or are still busy."""
        for process in self._processes:
            if not process.settled or process.popen.poll() is not None:
                process.end()
            else:
                process.channel.send(Rest())
                _idle.append(process)
        self._processes = []
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _start(self, most: float) -> None:
        training = self.training
        own = (training.loss, training.algorithm, training.local, training.collate_fn)
        shipped = (training.model, *own, training.clients)
        datasets = getattr(training.clients, "datasets", ())
        try:
            modules = unimportable_modules([*shipped, *datasets])
            arena, bounds = ship(training, modules, most=most, readers=self.count)
        except TooLarge:
            raise CannotShip(
                f"copies of the clients' data for worker processes would take more than {most / 1e9:.2g} GB; keep "
                f"arrays in files that np.load(path, mmap_mode='r') opens, which the processes open for themselves, "
                f"or pass engine='workers' to copy them anyway"
            ) from None
        except Exception as error:
            raise _unsendable(f"{type(error).__name__}: {error}") from error
        setup = Setup(bounds, [path or os.getcwd() for path in sys.path], torch.get_default_dtype())
        try:
            for _ in range(self.count):
                self._processes.append(_launch())
            for process in self._processes:
                process.settled = False
                process.channel.send(setup, arena.descriptor)
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

    def _prepare(self, work: Work, recalibrate: bool = False) -> tuple[dict[str, Tensor], Orders, int | None]:
        """Copy the round's tensors to shared memory; returns the descriptor to send along if the memory is new."""
        plan, count, fresh = _plan(work, self.training), len(work.clients), None
        if self._arena is None or self._arena.size < plan.size:
            if self._arena is not None:
                self._arena.close()
            self._arena = Arena.create(plan.size)
            fresh = self._arena.descriptor
        memory = self._arena.tensors(plan.places)
        for kind, values in (("down", work.broadcast), ("buffer", work.buffers), ("kept", work.kept)):
            for name, value in values.items():
                memory[f"{kind}:{name}"].copy_(value)
        assert count
        bare = replace(work, broadcast=Slots(), buffers={}, kept=Slots())
        return memory, Orders(bare, plan.places, recalibrate), fresh

    def _run(self, orders: Orders, descriptor: int | None, rows: list[int]) -> tuple[dict[int, str], list[Trace]]:
        """Train every row on the next free worker; returns the errors by row, and the traces."""
        probe = orders.work.probe
        modules = unimportable_modules([probe] if probe is not None else [])
        for module in (found := list(modules)):
            cloudpickle.register_pickle_by_value(module)
        message = cloudpickle.dumps(orders)
        for module in found:
            cloudpickle.unregister_pickle_by_value(module)
        self._cohort = orders.work.clients
        errors: dict[int, str] = {}
        traces: list[Trace] = []
        waiting = deque(rows)
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                process.settled = False
                self._send(process, message, descriptor)
                selector.register(process.channel.endpoint, selectors.EVENT_READ, process)
            for _ in range(_AHEAD):
                for process in self._processes:
                    self._give(process, waiting)
            while any(process.in_hand for process in self._processes):
                for key, _ in selector.select():
                    row, error, seen = cast(tuple[int, str | None, list[Trace]], self._receive(key.data))
                    key.data.in_hand.remove(row)
                    traces += seen
                    if error is not None:
                        errors[row] = error
                    self._give(key.data, waiting)
        for process in self._processes:
            process.settled = True
        return errors, traces

    def _give(self, process: Process, waiting: deque[int]) -> None:
        if waiting:
            process.in_hand.append(waiting.popleft())
            self._send(process, process.in_hand[-1])

    def _send(self, process: Process, message: object, descriptor: int | None = None) -> None:
        try:
            process.channel.send(message, descriptor)
        except (BrokenPipeError, ConnectionError):
            self._raise_dead(process)

    def _receive(self, process: Process) -> object:
        try:
            return process.channel.receive()[0]
        except (EOFError, ConnectionError):
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
            return process
        process.end()
    ours, theirs = socket.socketpair()
    environment = ALLOCATOR | os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with theirs, blocked():
        popen = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from fedlalr.training.engines.worker_process import main; main({theirs.fileno()})",
            ],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    return Process(popen, Channel(ours))


def _plan(work: Work, training: Training) -> SharedMemoryPlan:
    """The layout of a round in shared memory: what is sent to the workers, then what comes back."""
    plan, count, table = SharedMemoryPlan(), len(work.clients), training.algorithm.slots
    size, dtype = training.layout.size, training.layout.dtype
    sent: tuple[tuple[str, Mapping[str, Tensor]], ...] = (
        ("down", work.broadcast),
        ("buffer", work.buffers),
        ("kept", work.kept),
    )
    for kind, values in sent:
        for name, value in values.items():
            plan.add(f"{kind}:{name}", value.shape, value.dtype)
    for name in table.up:
        plan.add(f"up:{name}", (count, size), dtype)
    for name, value in work.buffers.items():
        plan.add(f"out_buffer:{name}", (count, *value.shape[work.per_client :]), value.dtype)
    for name in table.kept:
        plan.add(f"out_kept:{name}", (count, size), dtype)
    plan.add("loss", (count,), dtype)
    return plan
