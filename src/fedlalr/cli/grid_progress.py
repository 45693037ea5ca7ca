"""Progress of a grid of runs: one bar over all work with the time left, one line per completed run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn

from fedlalr.cli.progress import FACTS, RunsBar
from fedlalr.config import Config
from fedlalr.config.jobs import Event, Job, same_problem
from fedlalr.data.sources import SOURCES
from fedlalr.federation.progress import duration

_COST = {"mlp": 0.02, "logistic": 0.02}
"""Cost of a sample, relative to a convolutional or recurrent network."""
_MOMENT = 0.5


class GridProgress(RunsBar):
    """Follows the rounds of all pending jobs."""

    def __init__(self, console: Console, jobs: Sequence[Job], root: Path, quiet: bool) -> None:
        self.jobs = {job.folder: job for job in jobs}
        self.over: set[Path] = set()
        self.failed: dict[Path, str] = {}
        self._running: Sequence[Job] = ()
        # a folder may contain a run with other settings, which will be overwritten
        self._stale = {
            job.folder for job in jobs if job.rounds_done() and not same_problem(job.config.model_dump(), job.folder)
        }
        self._began = time.monotonic()
        self._before = self._progress()[0]
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        columns = (TextColumn("{task.fields[count]} runs"), BarColumn(bar_width=24), TaskProgressColumn())
        left = TextColumn("{task.fields[left]}")
        super().__init__(console, root, quiet, *columns, left, FACTS, total=1.0, count=self._count(), left="")

    def __enter__(self) -> Self:
        super().__enter__()
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()
        super().__exit__()

    def show(self, event: Event) -> None:
        """Handle an event."""
        self._running = event.running
        self._stale -= {job.folder for job in event.running}
        if event.over is None or event.summary is None:
            return
        self.over.add(event.over.folder)
        failure = event.summary["failure"]
        if failure:
            self.failed[event.over.folder] = failure
        if not self.quiet and (failure or not self.console.is_terminal):
            accuracy = event.summary["accuracy"]
            outcome = "" if accuracy is None else f"accuracy {accuracy:.1%}, "
            result = f"failed, {failure}" if failure else f"{outcome}{duration(event.summary['seconds'])}"
            self.console.print(f"{self._count()}  {self.label(event.over)}: {result}{self._ending()}")

    def left(self) -> float | None:
        """Seconds until the grid is done, at its pace so far; None before there is one."""
        done, total = self._progress()
        made, elapsed = done - self._before, time.monotonic() - self._began
        return elapsed * (total - done) / made if made > 0 and elapsed > 0 else None

    def _progress(self) -> tuple[float, float]:
        """The work that is done, and all of it."""
        return sum(map(self._done, self.jobs.values())), sum(work(job.config) for job in self.jobs.values())

    def _done(self, job: Job) -> float:
        if job.folder in self.over:
            return work(job.config)
        if job.folder in self._stale:
            return 0.0
        return work(job.config) * min(1.0, job.rounds_done() / int(job.config.rounds))

    def _watch(self) -> None:
        while not self._stop.wait(_MOMENT):
            done, total = self._progress()
            share, left = done / total if total else 1.0, self._ending().removeprefix("; ")
            facts = self.facts(self._running)
            self._bar.update(self._task, completed=share, count=self._count(), left=left, facts=facts)

    def _count(self) -> str:
        return f"{len(self.over):>{len(str(len(self.jobs)))}}/{len(self.jobs)}"

    def _ending(self) -> str:
        seconds = self.left()
        return "" if seconds is None else f"; {duration(seconds)} left"


def work(config: Config) -> float:
    """Samples that a run trains on, weighted by their cost."""
    population = config.partition.clients or 1
    cohort = config.clients_per_round or population
    local = config.local
    if local.epochs is not None:
        # per role, or in total
        samples = config.data.options.get("train") or SOURCES[config.data.name].train / population
        each = local.epochs * float(samples)
    else:
        each = float((local.steps or local.start or 1) * (config.batch_size or 1) * config.accumulate)
    return int(config.rounds) * cohort * each * _COST.get(config.model.name, 1.0)
