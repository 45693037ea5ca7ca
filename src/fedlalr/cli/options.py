"""Arguments and options shared by several commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedlalr.cli.progress import fetch_progress, standard_output
from fedlalr.common import reading
from fedlalr.config import Config, ConfigError
from fedlalr.config.errors import as_config_errors
from fedlalr.data import sources
from fedlalr.federation.progress import Terminal
from fedlalr.report.trackers import Tracker, TrackerMissing, create_tracker
from fedlalr.training.machine import choose_device

MOST_SEEDS = 10_000
"""A larger number is a typing error, and planning so many runs would exhaust the memory."""

WHAT = "[PRESET|FILE|RUN_DIR] [KEY=VALUE]..."
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar=WHAT, help="What to run (default: quickstart), and settings to change.", show_default=False),
]


def at_home(path: Path | None) -> Path | None:
    """Expand ~ to the home directory: a shell does not expand it in `--run-dir=~/runs`."""
    if path is None:
        return None
    path = reading.at_home(path)
    if os.path.isfile(path):
        raise typer.BadParameter(f"{path} is a file, but a directory is required; choose another path")
    return path


Places = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Run directories, or a directory that contains several.", show_default=False),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Parallel runs.", show_default="one per processor; one on a GPU")]
RunDir = Annotated[
    Path | None,
    typer.Option(help="Directory for the run's files.", show_default="a new folder under runs/", callback=at_home),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only the result.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Retrain clients whose replies were rejected, one by one, and show their data.")
]
Json = Annotated[bool, typer.Option("--json", help="Print only the result to standard output, as JSON.")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        help="tensorboard (into RUN_DIR/tensorboard) or mlflow (to MLFLOW_TRACKING_URI); repeatable.",
        show_default=False,
    ),
]


def split_arguments(arguments: list[str] | None) -> tuple[str | None, list[str]]:
    """What to run, if it is given, and the overrides."""
    given = arguments or []
    overrides = [argument for argument in given if is_setting(argument)]
    sources = [argument for argument in given if argument not in overrides]
    if len(sources) > 1:
        raise ConfigError(
            f"{sources[1]!r} is a second preset, file or run directory after {sources[0]!r}; give one of them, "
            f"and write settings as key=value"
        )
    return (sources[0] if sources else None), overrides


def is_setting(argument: str) -> bool:
    """Whether an argument is `key=value`. A path may contain a `=` after its first `/`; a setting does not.

    >>> is_setting("data.folder=/srv/data"), is_setting("runs/alpha=0.1"), is_setting("quickstart")
    (True, False, False)
    """
    key, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in key


def progress_console(as_json: bool) -> Console:
    """Where progress is shown: standard output, or standard error if the result is JSON."""
    return Terminal(stderr=True) if as_json else standard_output()


def fetch_if_needed(config: Config, console: Console, quiet: bool) -> None:
    """Download the data set, with a progress bar, if it is not on this machine."""
    if config.data.is_missing:
        with fetch_progress(console, quiet) as progress:
            sources.fetch(config.data.name, progress=progress)


def check_target(target: float | None) -> None:
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--target must be an accuracy above 0 and at most 1, not {target:g}")


def check_device(device: str) -> None:
    """Reject an unavailable device, once instead of in every run."""
    with as_config_errors(ValueError):
        choose_device(device)


@contextmanager
def tracked(names: Sequence[str] | None, config: Config, folder: Path) -> Iterator[list[Tracker]]:
    """The requested trackers; closed at the end of the block, also after an error."""
    name = f"{config.name}-{config.algorithm.name}-seed-{config.seed}"
    settings = config.problem()
    with ExitStack() as stack:
        with as_config_errors(ValueError, TrackerMissing):
            trackers = [create_tracker(kind, folder, name, settings) for kind in dict.fromkeys(names or ())]
        yield [stack.enter_context(tracker) for tracker in trackers]
