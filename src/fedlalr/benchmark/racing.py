"""Several contestants at the same job, one at a time and in turn: A B A B …

Each contestant is a separate process that is set up and warmed up, and that waits while another one has its turn. Other
load on the machine thus affects all of them alike, and ratios are meaningful even if the seconds are not.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

_PINNED = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Contestant:
    """A name and the command of a process that takes turns, see `Turns`."""

    name: str
    command: tuple[str, ...]
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RaceResult:
    """The measurements of one contestant."""

    name: str
    seconds: tuple[float, ...]
    """Of each timed round."""
    startup: float
    """Seconds from the start of the process to its first round."""
    memory: int
    """Peak bytes of the process and its children together; shared memory is counted in each."""
    processor: tuple[float, ...]
    """CPU seconds of each round, over all its processes. Less affected by other load on the machine."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def ratio(self, base: RaceResult) -> float:
        """Time relative to another contestant: the median ratio of consecutive rounds."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.seconds, base.seconds, strict=True))

    def processor_ratio(self, base: RaceResult) -> float | None:
        """CPU time relative to another contestant, over all rounds; None if the system does not report it."""
        spent = sum(base.processor)
        return sum(self.processor) / spent if spent else None


def plain_loop(job: str, device: str = "cpu") -> Contestant:
    """The plain loop, with one thread."""
    return _own("plain loop", "plain", job, 1, device)


def ours(job: str, engine: str = "auto", method: str = "fedavg", threads: int = 1, device: str = "cpu") -> Contestant:
    """This library with an engine and a method."""
    name = f"fedlalr, {engine}" if method == "fedavg" else f"fedlalr, {engine}, {method}"
    return _own(name, "ours", job, threads, device, engine, method)


def _own(name: str, kind: str, job: str, threads: int, *options: str) -> Contestant:
    command = (sys.executable, "-m", "fedlalr.benchmark.contestant", kind, job, str(threads), *options)
    return Contestant(name, command, threads)


def race(
    contestants: Sequence[Contestant],
    rounds: int = 5,
    warm_up: int = 2,
    on_round: Callable[[str, int, float], None] | None = None,
) -> list[RaceResult]:
    """Time `rounds` rounds of each contestant, in turn, after some warm-up rounds; `on_round` gets every time."""
    with ExitStack() as stack:
        runners = [_Runner(contestant, stack) for contestant in contestants]
        for runner in runners:
            for _ in range(warm_up):
                runner.turn()
        for turn in range(rounds):
            for runner in runners:
                runner.timed_turn()
                if on_round is not None:
                    on_round(runner.contestant.name, turn + 1, runner.seconds[-1])
        return [runner.result() for runner in runners]


class _Runner:
    """A running contestant. It ends with the stack, which closes its standard input."""

    def __init__(self, contestant: Contestant, stack: ExitStack) -> None:
        self.contestant = contestant
        environment = dict(os.environ) | dict.fromkeys(_PINNED, str(contestant.threads)) | dict(contestant.environment)
        began = time.perf_counter()
        process = subprocess.Popen(
            contestant.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.process = stack.enter_context(process)
        self.seconds: list[float] = []
        self.processor: list[float] = []
        if (answer := self._answer()) != "ready":
            raise RuntimeError(f"{contestant.name} wrote {answer!r} instead of 'ready'")
        self.startup = time.perf_counter() - began

    def turn(self) -> float:
        """Run one round; return its seconds as measured by the contestant."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._answer())

    def timed_turn(self) -> None:
        """Run one timed round."""
        before = _processor_time(self.process.pid)
        self.seconds.append(self.turn())
        self.processor.append(_processor_time(self.process.pid) - before)

    def result(self) -> RaceResult:
        memory = _peak_memory(self.process.pid)
        return RaceResult(self.contestant.name, tuple(self.seconds), self.startup, memory, tuple(self.processor))

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise RuntimeError(f"{self.contestant.name} failed:\n{self.process.stderr.read()[-2000:]}")
        return line.strip()


def _peak_memory(pid: int) -> int:
    """Peak bytes of a process and its children; 0 if the system does not report them."""
    return sum(
        int(line.split()[1]) * 1024
        for process in _family(pid)
        for line in _read(process, "status").splitlines()
        if line.startswith("VmHWM")
    )


def _processor_time(pid: int) -> float:
    """CPU seconds of a process and its children; 0 if the system does not report them."""
    spent = (_read(process, "stat").rpartition(")")[2].split()[11:13] for process in _family(pid))
    return sum(int(ticks) for both in spent for ticks in both) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> list[int]:
    """A process and all its descendants."""
    children = _read(pid, f"task/{pid}/children").split()
    return [pid, *(member for child in children for member in _family(int(child)))]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:  # not Linux, or a process that has just ended
        return ""
