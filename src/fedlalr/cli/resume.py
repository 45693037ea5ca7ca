"""`fedlalr resume`: go on with a run that broke off."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlalr.cli.options import Debug, Json, Quiet, at_home, progress_console
from fedlalr.cli.run import run_shown
from fedlalr.cli.tracking import Track, tracked


def resume(
    run_dir: Annotated[Path, typer.Argument(help="The directory of the run.", show_default=False, callback=at_home)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="rounds=N, to go further than planned.", show_default=False),
    ] = None,
    track: Track = None,
    debug: Debug = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go on with a run from its last checkpoint; on a CPU bit for bit as if it had never stopped.

    [bold]Examples[/]

    fedlalr resume runs/cifar10

    fedlalr resume runs/cifar10 rounds=200
    """
    from fedlalr import config as configuration
    from fedlalr.config.loading import CONFIG_FILE
    from fedlalr.training.ranks import process_rank

    if not run_dir.is_dir():
        raise configuration.ConfigError(
            f"there is no directory {run_dir}; name that of a run, as `fedlalr run` told it"
        )
    if not (run_dir / CONFIG_FILE).is_file():
        if configuration.RunDirectory(run_dir).holds_run:
            raise configuration.ConfigError(
                f"the run in {run_dir} was started from Python or by `fedlalr flower local`: there is no {CONFIG_FILE} "
                f"in it. It goes on with the same call of fl.run(…, run_dir={str(run_dir)!r}, resume=True), "
                f"or with the same command"
            )
        raise configuration.ConfigError(f"{run_dir} holds no run: there is no {CONFIG_FILE} in it")
    config = configuration.load(run_dir, overrides or [])
    if process_rank() > 0:  # under torchrun the first process reads, writes and shows, for all
        configuration.execute(config)
        return
    with tracked(track, config, run_dir) as trackers:
        run_shown(
            run_dir,
            progress_console(as_json),
            quiet,
            as_json,
            lambda progress: configuration.execute(config, run_dir, [progress, *trackers], resume=True, debug=debug),
        )
