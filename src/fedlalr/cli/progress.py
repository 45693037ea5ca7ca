"""Progress of downloads and of several runs; `federation/progress.py` shows that of one run."""

from __future__ import annotations

import json
import sys
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
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedlalr.cli.files import data_folder_errors
from fedlalr.config.jobs import Event, Job
from fedlalr.federation.progress import Terminal, duration, megabytes
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
            self.console.print(f"{event.done:>{width}}/{event.total}  {self.label(event.over)}: {self._outcome(event)}")

    def _outcome(self, event: Event) -> str:
        summary = event.summary or {}
        if summary["failure"]:
            known, what = len(self._failures), kind(summary["failure"])
            self._failures.add(what)
            return "failed in the same way" if len(self._failures) == known else f"failed, {summary['failure']}"
        accuracy = "no accuracy" if summary["accuracy"] is None else f"accuracy {summary['accuracy']:.1%}"
        return f"{accuracy}, {'already finished' if event.reused else duration(summary['seconds'])}"
