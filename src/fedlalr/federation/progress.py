"""Progress of a run: a live line on a terminal, a line that is updated in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from fedlalr.common.printable import has_terminal, printable
from fedlalr.federation.observers import Observer, RunInfo
from fedlalr.federation.record import Record, loss_name, over_clients, spent

PLAIN_LINES = 100
"""Approximate maximum number of lines per run of a command that is not on a terminal."""
LONG_RUN = 600
"""Estimated seconds above which a run gets a warning."""
_UPDATE_EVERY = 0.2
"""Seconds between two updates of a notebook."""


class Terminal(Console):
    """A console that prints text literally: no markup, no highlighting, no escape codes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


@contextmanager
def displayed(progress: bool | None) -> Iterator[Sequence[Observer]]:
    """The display that `fl.run` adds to its observers; with None only on a terminal and in a notebook."""
    on_terminal = has_terminal()
    # also if CI sets FORCE_COLOR
    console = Terminal(stderr=True, force_terminal=on_terminal, soft_wrap=not on_terminal)
    if console.is_jupyter:
        with NotebookProgress(console) as display:
            yield [display]
    elif on_terminal or progress:
        with RunProgress(console, lines=None) as display:
            yield [display]
    else:
        yield []


class RunProgress(Observer):
    """Shows round, accuracy, loss, learning rate, megabytes sent and time left. A context manager.

    `lines` is the approximate maximum number of lines if the console is not a terminal; None: one per round.
    """

    def __init__(self, console: Console, quiet: bool = False, lines: int | None = PLAIN_LINES) -> None:
        self.console, self.quiet, self.lines = console, quiet, lines
        self.live = console.is_terminal and not quiet
        self.info: RunInfo
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
            # what is printed during a run appears above the line, unless it goes to a file
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
            redirect_stderr=has_terminal(),
        )

    def __enter__(self) -> RunProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_start(self, info: RunInfo) -> None:
        self.info, self._began = info, time.monotonic()
        self._sent = sum(each.bytes_up + each.bytes_down for each in info.history)
        if self.quiet:
            return
        for line in headed(info):
            self.console.print(line)
        if self.live:
            self._progress.add_task("run", total=info.rounds, completed=info.first_round - 1, facts="")
            self._progress.start()

    def on_round(self, record: Record) -> None:
        self._sent += record.bytes_up + record.bytes_down
        if self.live:
            self._progress.update(self._progress.task_ids[0], completed=record.round, facts=self._facts(record))
        elif not self.quiet and self._is_due(record.round):
            self.console.print(self._line(record))

    def _line(self, record: Record) -> str:
        place = f"round {record.round:>{len(str(self.info.rounds))}}/{self.info.rounds}"
        each = (time.monotonic() - self._began) / (record.round - self.info.first_round + 1)
        return f"{place}  {self._facts(record)}  {duration(each * (self.info.rounds - record.round))} left"

    def _facts(self, record: Record) -> str:
        accuracy = "" if record.accuracy is None else f"accuracy {record.accuracy:6.1%}  "
        accuracy += over_clients(record.per_client) + spent(record)
        rejected = f"  {len(record.rejected)} rejected" if record.rejected else ""
        loss = f"{loss_name(record)} {record.loss:.3f}"
        return f"{accuracy}{loss}  rate {record.lr:.3g}  {megabytes(self._sent)} sent{rejected}"

    def _is_due(self, round: int) -> bool:
        rounds = self.info.rounds
        return self.lines is None or round in (1, rounds) or round % max(1, rounds // self.lines) == 0


class NotebookProgress(RunProgress):
    """Text below a notebook's cell that is updated in place. It needs no widgets and stays in a saved notebook."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, quiet=True)
        self._shown_at = 0.0
        self._last: Record | None = None

    def on_start(self, info: RunInfo) -> None:
        from IPython.display import display

        super().on_start(info)
        self._heading = headed(info)
        self._handle = display(self._text(), raw=True, display_id=True)

    def on_round(self, record: Record) -> None:
        self._sent += record.bytes_up + record.bytes_down
        self._last = record
        if time.monotonic() >= self._shown_at + _UPDATE_EVERY:
            self._show()

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            self._show()

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        self._handle.update(self._text(), raw=True)

    def _text(self) -> dict[str, str]:
        lines = [*self._heading, *([] if self._last is None else [self._line(self._last)])]
        return {"text/plain": printable("\n".join(lines))}


def headed(info: RunInfo) -> list[str]:
    """What is shown when a run starts."""
    lines = [
        f"{info.algorithm}: {info.population:,} clients, {info.clients_per_round:,} per round, "
        f"{info.parameters:,} parameters; engine {info.engine} ({info.reason}) on {info.device}"
    ]
    if info.seconds is not None and info.seconds > LONG_RUN:
        lines.append(
            f"warning: this takes about {in_hours(info.seconds)} on this CPU; run it on a GPU (device=cuda), "
            f"or try fewer rounds first (rounds={max(1, info.rounds // 50)})"
        )
    return lines


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
