"""`fedlalr flower`: export a preset as a Flower app, and run a federation of real processes on this machine."""

from __future__ import annotations

import importlib.util
import math
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedlalr.cli.command import Command
from fedlalr.cli.errors import FAILED, hint_to_repeat
from fedlalr.cli.options import (
    Arguments,
    Json,
    Quiet,
    at_home,
    fetch_if_needed,
    is_setting,
    progress_console,
    split_arguments,
)
from fedlalr.cli.progress import print_json, standard_output
from fedlalr.cli.run import cost, outcome
from fedlalr.common.printable import complain
from fedlalr.config import Config, ConfigError, RunDirectory
from fedlalr.config.run_dir import summarise
from fedlalr.federation import Record, RunInfo
from fedlalr.federation.progress import RunProgress
from fedlalr.federation.session import initial_state, run_info
from fedlalr.flower.export import check_data, check_settings, data_here, for_nodes
from fedlalr.flower.export import export as write

app = typer.Typer(no_args_is_help=True, help="Run on Flower: on several machines whose data stays where it is.")

Nodes = Annotated[
    int | None,
    typer.Option(min=1, help="Number of supernodes, one client each.", show_default="partition.clients, or 3"),
]


@app.command(cls=Command)
def export(
    preset: Annotated[str, typer.Argument(help="A preset's name, a YAML file or a run directory.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the app: new or empty.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change.", show_default=False)
    ] = None,
    nodes: Nodes = None,
) -> None:
    """Write a Flower app for a preset, ready for `flwr run`.

    By default, each node serves one client, and all clients take part in every round.

    [bold]Examples[/]

    fedlalr flower export quickstart app

    fedlalr flower export fashion app algorithm=fedadam rounds=20 --nodes 10
    """
    place, settings = _split(preset, [str(folder), *(overrides or [])])
    config = for_nodes(preset, settings, nodes)
    write(config, place)
    console = standard_output()
    console.print(
        f"{place}: {config.algorithm.name} on {config.data.name}, {config.partition.clients} clients. "
        f"Read {place / 'README.md'}; then: flwr run {shlex.quote(str(place))} --stream"
    )
    if not data_here(config):
        console.print(f"{config.data.name} is not on this machine, so its partition was not checked")


def _split(preset: str, arguments: list[str]) -> tuple[Path, list[str]]:
    """The app's folder, and the settings, in any order."""
    folders = [argument for argument in arguments if not is_setting(argument)]
    settings = [argument for argument in arguments if is_setting(argument)]
    if not folders:
        command = shlex.join(["fedlalr", "flower", "export", preset, "app", *settings])
        raise ConfigError(f"the app's folder is missing; write, for example: {command}")
    if len(folders) > 1:
        raise ConfigError(
            f"the app's folder is {folders[0]}, and {folders[1]!r} is not a setting; write settings as key=value"
        )
    return Path(folders[0]), settings


@app.command(cls=Command)
def local(
    arguments: Arguments = None,
    nodes: Nodes = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Directory for metrics and checkpoints.", show_default="a temporary one", callback=at_home),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Use no certificates and no node keys.")] = False,
    patience: Annotated[float, typer.Option(help="Maximum seconds per round.")] = 600.0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a preset with Flower's real processes on this machine: a superlink, supernodes, TLS and node keys.

    The first round takes longer than the others: it starts a trainer process for every node. Only the loopback
    interface is used. All processes and temporary files are removed at the end, even after Ctrl-C.

    [bold]Examples[/]

    fedlalr flower local --nodes 3 rounds=3

    fedlalr flower local quickstart algorithm=scaffold rounds=5 --run-dir runs/flower
    """
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("this needs Flower: pip install 'fedlalr[flower]'")
    from fedlalr.flower.local.demonstration import demonstrate
    from fedlalr.flower.local.launch import FederationError

    if not (patience > 0 and math.isfinite(patience)):
        raise ConfigError(f"--patience must be a finite number of seconds above 0, not {patience:g}")
    source, overrides = split_arguments(arguments)
    config = for_nodes(source, overrides, nodes)
    check_settings(config)
    console = progress_console(as_json)
    fetch_if_needed(config, console, quiet)
    silent = quiet or (as_json and not console.is_terminal)
    problem, history = check_data(config), RunDirectory(run_dir).records() if run_dir is not None else []
    info = run_info(problem, initial_state(problem.training), "flower", "real processes")
    info = replace(info, first_round=len(history) + 1, history=tuple(history))
    keeping = hint_to_repeat() if run_dir is not None else nullcontext()
    try:
        with keeping, RunProgress(console, silent) as progress:
            records = demonstrate(
                config,
                run_dir,
                secure=not insecure,
                patience=patience,
                on_stage=lambda stage: None if silent else _stage(progress, stage, info),
                on_record=progress.on_round,
            )
    except FederationError as error:
        complain(f"error: {error}")
        raise typer.Exit(FAILED) from error
    _show(config, info, records, as_json)


def _stage(progress: RunProgress, stage: str, info: RunInfo) -> None:
    progress.console.print(f"starting {stage}")
    if stage == "the run":
        progress.on_start(info)


def _show(config: Config, info: RunInfo, records: list[Record], as_json: bool) -> None:
    summary = summarise(config, info, records)
    if as_json:
        print_json(summary)
        return
    method = summary["algorithm"]["name"]
    standard_output().print(
        f"{summary['name']} with {method} on {info.population} supernodes: {outcome(summary, records)}; {cost(summary)}"
    )
