"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedlalr.common import reading

if TYPE_CHECKING:
    from fedlalr.config import Config

MOST_SEEDS = 10_000
"""A number above this is a slip of the finger, and the plan of so many runs alone would fill the memory."""

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PRESET|FILE|RUN_DIR] [KEY=VALUE]...",
        help="What to run (quickstart unless given), and the settings to change.",
        show_default=False,
    ),
]


def at_home(path: Path | None) -> Path | None:
    """A folder with ~ as the home directory: a shell leaves it alone in `--run-dir=~/runs`."""
    if path is None:
        return None
    path = reading.at_home(path)
    if os.path.isfile(path):
        raise typer.BadParameter(f"{path} is a file, and a directory is needed here; name another one")
    return path


RunDir = Annotated[
    Path | None,
    typer.Option(help="Where the run's files go.", show_default="a new folder under runs/", callback=at_home),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only the result.")]
Debug = Annotated[
    bool, typer.Option("--debug", help="Train clients whose replies are refused again, alone, and show their data.")
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on standard output, and nothing else there.")
]


def split_arguments(arguments: list[str] | None) -> tuple[str, list[str]]:
    """What to run, and the overrides."""
    from fedlalr.config import ConfigError

    given = arguments or []
    overrides = [argument for argument in given if is_setting(argument)]
    sources = [argument for argument in given if argument not in overrides]
    if len(sources) > 1:
        raise ConfigError(
            f"{sources[1]!r} is neither the first argument (a preset, file or run directory) nor a setting; "
            f"settings are written key=value"
        )
    return (sources or ["quickstart"])[0], overrides


def is_setting(argument: str) -> bool:
    """Whether an argument is `key=value`; a path may have a `=` after its first `/`, where no setting has one.

    >>> is_setting("data.folder=/srv/data"), is_setting("runs/alpha=0.1"), is_setting("quickstart")
    (True, False, False)
    """
    key, equals, _ = argument.partition("=")
    return bool(equals) and "/" not in key


def progress_console(as_json: bool) -> Console:
    """Where progress is shown: with the results, but beside them when those are JSON."""
    from fedlalr.cli.progress import Terminal, standard_output

    return Terminal(stderr=True) if as_json else standard_output()


def fetch_if_needed(config: Config, console: Console, quiet: bool) -> None:
    """Download the data set now, with a bar, if it is nowhere on this machine."""
    from fedlalr.cli.progress import fetch_progress
    from fedlalr.data import sources

    where = {data.name: data.where for data in sources.available()}
    if config.data.folder is None and where[config.data.name] is None:
        with fetch_progress(console, quiet) as progress:
            sources.fetch(config.data.name, progress=progress)


def check_device(device: str) -> None:
    """Refuse a device that is not here, once and not for every run."""
    from fedlalr.config import ConfigError
    from fedlalr.federation.options import choose_device

    try:
        choose_device(device)
    except ValueError as error:
        raise ConfigError(str(error)) from error
