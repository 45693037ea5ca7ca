"""`fedlalr resume`: resume an interrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlalr import config as configuration
from fedlalr.cli.options import Debug, Json, Quiet, Track, at_home, progress_console, tracked
from fedlalr.cli.run import run_shown
from fedlalr.config.loading import CONFIG_FILE
from fedlalr.report.runs import runs_below
from fedlalr.training.ranks import process_rank


def resume(
    run_dir: Annotated[Path, typer.Argument(help="The run directory.", show_default=False, callback=at_home)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="rounds=N, to extend the run.", show_default=False),
    ] = None,
    track: Track = None,
    debug: Debug = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Resume a run from its last checkpoint; on a CPU, bit for bit like an uninterrupted run.

    [bold]Examples[/]

    fedlalr resume runs/cifar10

    fedlalr resume runs/cifar10 rounds=200
    """
    if not run_dir.is_dir():
        raise configuration.ConfigError(
            f"there is no directory {run_dir}; give the run directory that `fedlalr run` printed"
        )
    if not (run_dir / CONFIG_FILE).is_file():
        if configuration.RunDirectory(run_dir).holds_run:
            raise configuration.ConfigError(
                f"the run in {run_dir} was started from Python or by `fedlalr flower local`: it has no {CONFIG_FILE}. "
                f"Resume it with the same call of fl.run(…, run_dir={str(run_dir)!r}, resume=True), "
                f"or repeat the same command"
            )
        if below := runs_below(run_dir):
            raise configuration.ConfigError(
                f"{run_dir} is no run, but contains some, such as {below[0]}. Give one of them; "
                f"to resume a comparison, repeat its `fedlalr compare` command"
            )
        raise configuration.ConfigError(f"{run_dir} contains no run: it has no {CONFIG_FILE}")
    config = configuration.load(run_dir, overrides or [])
    if process_rank() > 0:  # under torchrun only the first process reads, writes and shows progress
        configuration.execute(config)
        return
    with tracked(track, config, run_dir) as trackers:
        run_shown(config, run_dir, trackers, progress_console(as_json), quiet, as_json, resume=True, debug=debug)
