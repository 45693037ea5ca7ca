"""What commands show: results, and the progress of downloads and of several runs.

The progress of one run is shown by `federation/progress.py`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedlalr.cli.files import data_folder_errors
from fedlalr.config import Config
from fedlalr.config.jobs import Event, Job, same_problem
from fedlalr.config.run_dir import Summary
from fedlalr.data.sources import SOURCES
from fedlalr.federation.progress import Terminal, duration, megabytes
from fedlalr.federation.record import judged_on
from fedlalr.report.comparison import Curve
from fedlalr.report.tables import kind

_PLAIN_WIDTH = 130


def standard_output() -> Console:
    """The console for results; wide enough for a table if it is not a terminal."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Terminal(width=width, soft_wrap=not sys.stdout.isatty())


def print_json(result: object) -> None:
    """Print a result to standard output, alone on its line."""
    print(json.dumps(result, ensure_ascii=False))


def table(heading: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> Table:
    """Rows under a heading; the first column is left-aligned, the others right-aligned."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title, title_justify="left")
    for i, name in enumerate(heading):
        made.add_column(name, justify="right" if i else "left")
    for row in rows:
        made.add_row(*row)
    return made


@contextmanager
def fetch_progress(console: Console, quiet: bool) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """A progress bar for downloads; one line per download on plain output."""
    shown: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
    )
    live = console.is_terminal and not quiet
    with data_folder_errors(), Progress(*columns, console=console, disable=not live) as bars:

        def show(what: str, done: int, total: int | None) -> None:
            if what not in shown:
                shown[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(what + (f" ({megabytes(total)})" if total else ""))
            bars.update(shown[what], completed=done, total=total)

        yield None if quiet else show


FACTS = TextColumn("{task.fields[facts]}", markup=False)
"""The runs in progress."""


class RunsBar:
    """A bar over several runs, on a terminal. A context manager."""

    def __init__(self, console: Console, root: Path, quiet: bool, *columns: ProgressColumn, **task: Any) -> None:
        self.console, self.root, self.quiet = console, root, quiet
        shown = console.is_terminal and not quiet
        self._bar = Progress(*columns, console=console, transient=True, disable=not shown)
        self._task = self._bar.add_task("runs", facts="", **task)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def label(self, job: Job) -> str:
        return str(job.folder.relative_to(self.root))

    def facts(self, running: Sequence[Job]) -> str:
        """The first of the running jobs, with their rounds."""
        return " · ".join(f"{self.label(job)} {job.rounds_done()}/{job.config.rounds}" for job in running[:2])


class JobsProgress(RunsBar):
    """Progress of several runs: a bar on a terminal, one line per completed run elsewhere."""

    def __init__(self, console: Console, root: Path, quiet: bool) -> None:
        columns = (MofNCompleteColumn(), TextColumn("runs"), BarColumn(bar_width=20), FACTS)
        left = (TimeRemainingColumn(compact=True), TextColumn("left"))
        super().__init__(console, root, quiet, *columns, *left, total=None)
        self._failures: set[str] = set()
        """Failures already shown, so that failures with the same cause are shown once."""

    def show(self, event: Event) -> None:
        """Handle an event."""
        self._bar.update(self._task, completed=event.done, total=event.total, facts=self.facts(event.running))
        if event.over is None or event.summary is None or self.quiet:
            return
        if not self.console.is_terminal or event.summary["failure"]:
            width = len(str(event.total))
            outcome = self._outcome(event.over, event.summary, event.reused)
            self.console.print(f"{event.done:>{width}}/{event.total}  {self.label(event.over)}: {outcome}")

    def _outcome(self, job: Job, summary: Summary, reused: bool) -> str:
        if summary["failure"]:
            known, what = len(self._failures), kind(summary["failure"])
            self._failures.add(what)
            return "failed in the same way" if len(self._failures) == known else f"failed, {summary['failure']}"
        accuracy = summary["accuracy"]
        measured = _loss(job) if accuracy is None else f"accuracy {accuracy:.1%}"
        return f"{measured}, {'already finished' if reused else duration(summary['seconds'])}"


def _loss(job: Job) -> str:
    records = job.directory.records()
    name, loss = f"{judged_on(records)} loss", Curve(records).final_loss
    return f"no finite {name}" if loss is None else f"{name} {loss:.4g}"


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
        self._stale = {job.folder for job in jobs if job.rounds_done() and not same_problem(job)}
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
