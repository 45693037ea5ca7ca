"""Progress of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedlalr.cli.files import data_folder_errors
from fedlalr.common.printable import printable
from fedlalr.config import RunDirectory
from fedlalr.config.jobs import Event, Job
from fedlalr.federation import Observer, Record, RunInfo
from fedlalr.federation.record import over_clients
from fedlalr.report.failures import kind

_PLAIN_LINES = 100
"""Approximate maximum number of lines per run when not on a terminal."""
_PLAIN_WIDTH = 130
LONG_RUN = 600
"""Estimated seconds above which a run gets a warning."""


class Terminal(Console):
    """A console that prints text literally: no markup, no highlighting, no escape codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def standard_output() -> Console:
    """The console for results; wide enough for a table if it is not a terminal."""
    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    return Terminal(width=width, soft_wrap=not sys.stdout.isatty())


class RunProgress(Observer):
    """Shows round, accuracy, loss, learning rate, megabytes sent and time left. A context manager.

    `folder` is the run directory, from which a resumed run reads the bytes sent so far.
    """

    def __init__(self, console: Console, quiet: bool = False, folder: Path | None = None) -> None:
        self.console, self.quiet, self.folder = console, quiet, folder
        self.live = console.is_terminal and not quiet
        self.info: RunInfo | None = None
        self.records: list[Record] = []
        self._sent = 0
        self._began = 0.0
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=not self.live,
        )

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_start(self, info: RunInfo) -> None:
        self.info, self._began = info, time.monotonic()
        if self.quiet:
            return
        self.console.print(
            f"{info.algorithm}: {info.population:,} clients, {info.clients_per_round:,} per round, "
            f"{info.parameters:,} parameters; engine {info.engine} ({info.reason}) on {info.device}"
        )
        if info.seconds is not None and info.seconds > LONG_RUN:
            self.console.print(
                f"warning: this takes about {in_hours(info.seconds)} on this CPU; run it on a GPU (device=cuda), "
                f"or try fewer rounds first (rounds={max(1, info.rounds // 50)})"
            )
        if self.live:
            self._progress.add_task("run", total=info.rounds, completed=info.first_round - 1, facts="")
            self._progress.start()

    def on_round(self, record: Record) -> None:
        if not self.records:
            self._sent = self._sent_before(record.round)
        self.records.append(record)
        self._sent += record.bytes_up + record.bytes_down
        if self.live:
            self._progress.update(self._progress.task_ids[0], completed=record.round, facts=self._facts(record))
        elif not self.quiet and self._is_due(record.round):
            rounds = self.info.rounds if self.info else record.round
            place = f"round {record.round:>{len(str(rounds))}}/{rounds}"
            self.console.print(f"{place}  {self._facts(record)}  {self._left(record.round)} left")

    def _sent_before(self, round: int) -> int:
        """Bytes sent before the given round by a resumed run."""
        if self.folder is None or round == 1 or self.quiet:
            return 0
        before = (record for record in RunDirectory(self.folder).records() if record.round < round)
        return sum(record.bytes_up + record.bytes_down for record in before)

    def _facts(self, record: Record) -> str:
        accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:6.1%}  "
        accuracy += over_clients(record.per_client)
        rejected = f"  {len(record.rejected)} rejected" if record.rejected else ""
        return f"{accuracy}loss {record.loss:.3f}  rate {record.lr:.3g}  {megabytes(self._sent)} sent{rejected}"

    def _is_due(self, round: int) -> bool:
        rounds = self.info.rounds if self.info else round
        return round in (1, rounds) or round % max(1, rounds // _PLAIN_LINES) == 0

    def _left(self, round: int) -> str:
        first, rounds = (self.info.first_round, self.info.rounds) if self.info else (1, round)
        done = round - first + 1
        return duration((time.monotonic() - self._began) / done * (rounds - round))


@contextmanager
def fetch_progress(console: Console, quiet: bool) -> Iterator[Callable[[str, int, int | None], None] | None]:
    """A progress bar for downloads; one line per download on plain output."""
    with data_folder_errors():
        if quiet:
            yield None
            return
        with _fetch_bars(console) as show:
            yield show


@contextmanager
def _fetch_bars(console: Console) -> Iterator[Callable[[str, int, int | None], None]]:
    shown: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def show(what: str, done: int, total: int | None) -> None:
            if what not in shown:
                shown[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(what + (f" ({megabytes(total)})" if total else ""))
            bars.update(shown[what], completed=done, total=total)

        yield show


def megabytes(size: int) -> str:
    """
    >>> megabytes(1_234_567)
    '1.2 MB'
    """
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


def duration(seconds: float) -> str:
    """
    >>> duration(7.4), duration(75), duration(3700)
    ('7 s', '1:15', '1:01:40')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_hours(seconds: float) -> str:
    """
    >>> in_hours(1_000), in_hours(100_000), in_hours(10_000_000)
    ('17 minutes', '28 hours', '116 days')
    """
    for unit, size in (("days", 86_400), ("hours", 3_600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 60:.0f} minutes"


class JobsProgress:
    """Progress of several runs: a bar on a terminal, one line per completed run elsewhere. A context manager."""

    def __init__(self, console: Console, root: Path, quiet: bool) -> None:
        self.console, self.root, self.quiet = console, root, quiet
        self._progress = Progress(
            MofNCompleteColumn(),
            TextColumn("runs"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}", markup=False),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._failures: set[str] = set()
        """Failures already shown, so that failures with the same cause are shown once."""

    def __enter__(self) -> JobsProgress:
        self._task = self._progress.add_task("runs", total=None, facts="")
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: Event) -> None:
        """Handle an event."""
        running = " · ".join(f"{self._label(job)} {job.rounds_done()}/{job.config.rounds}" for job in event.running[:2])
        self._progress.update(self._task, completed=event.done, total=event.total, facts=running)
        if event.over is None or event.summary is None or self.quiet:
            return
        if not self.console.is_terminal or event.summary["failure"]:
            width = len(str(event.total))
            self.console.print(
                f"{event.done:>{width}}/{event.total}  {self._label(event.over)}: {self._outcome(event)}"
            )

    def _label(self, job: Job) -> str:
        return str(job.folder.relative_to(self.root))

    def _outcome(self, event: Event) -> str:
        summary = event.summary or {}
        if summary["failure"]:
            known, what = len(self._failures), kind(summary["failure"])
            self._failures.add(what)
            return "failed in the same way" if len(self._failures) == known else f"failed, {summary['failure']}"
        accuracy = "no accuracy" if summary["accuracy"] is None else f"accuracy {summary['accuracy']:.1%}"
        return f"{accuracy}, {'already finished' if event.reused else duration(summary['seconds'])}"
