"""`fedlalr reproduce`: a figure of the paper, its data and the verdicts on its claims, with one command."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedlalr.cli.compare import reject_algorithm
from fedlalr.cli.errors import FAILED, NO_DATA
from fedlalr.cli.options import MOST_SEEDS, Jobs, Json, Quiet, at_home, check_device, progress_console
from fedlalr.cli.progress import print_json
from fedlalr.common.files import as_file_name
from fedlalr.config.jobs import default_workers
from fedlalr.paper.figure_options import check_beside, check_methods, figures_for, split_device
from fedlalr.paper.plans import FIGURES, HOW_RUN, FigureName, Request, key_of
from fedlalr.paper.settings import Scale

LONGEST_NAME = 120


def reproduce(
    figure: Annotated[
        Literal[FigureName, "all"],
        typer.Argument(metavar="FIGURE", help=f"{', '.join(FIGURES)}, all.", show_default=False),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change in every run.", show_default=False),
    ] = None,
    scale: Annotated[
        Scale, typer.Option(help="smoke: small, minutes on two cores. paper: the paper's setting.")
    ] = "smoke",
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Seeds per curve.")] = 1,
    methods: Annotated[
        str | None,
        typer.Option(help="Run only these; the figure also shows finished runs of the others.", show_default="all six"),
    ] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD:KEY=VALUE,…", help="Also show a method with other settings than the paper's; repeatable."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "auto",
    jobs: Jobs = None,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Run nothing; draw and judge the existing runs.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Do not download data.")] = False,
    run_dir: Annotated[Path, typer.Option(help="Directory for runs and figures.", callback=at_home)] = Path(
        "runs/reproduce"
    ),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Reproduce a figure of the paper, and report which of its claims hold.

    FIGURE is heterogeneity, cifar, shakespeare, scalability, interval,
    trajectory, speedup or all; or a study of what the paper leaves open:
    choices (BatchNorm statistics, GroupNorm, clipping, epochs, weights) or
    variants (of FedLALR).

    [bold]RUN_DIR/SCALE[/] gets the figure as PNG, SVG and PDF, its data as CSV,
    its provenance as JSON, [bold]verdicts.md[/], and all runs under
    [bold]runs/[/]. Changed settings become part of the folder's name.

    Finished runs are reused and interrupted runs are resumed: repeat the command
    until all runs are finished. At scale smoke, the digits data set replaces
    data sets that are not on this machine, and the figure says so.

    [bold]Examples[/]

    fedlalr reproduce heterogeneity

    fedlalr reproduce all --seeds 3

    fedlalr reproduce cifar --scale paper --device cuda

    fedlalr reproduce cifar --scale paper buffers=recalibrate --methods fedlalr,fedavg

    fedlalr reproduce cifar --scale paper --beside fedadam:server_lr=0.1
    """
    from fedlalr.cli.figure_runs import FigureRuns, data_of_runs, find_data  # here, as matplotlib takes a second
    from fedlalr.cli.verdict_table import as_plain, show

    device, changes = split_device(overrides or (), device)
    reject_algorithm(changes)
    names, left_out = figures_for(FIGURES if figure == "all" else [figure], changes)
    chosen, shown_beside = check_methods(methods, names), check_beside(beside or (), names)
    if not draw_only:
        check_device(device)
    console = progress_console(as_json)
    silent = quiet or (as_json and not console.is_terminal)
    fetching = scale == "paper" and not (offline or draw_only)
    for sentence in left_out:
        console.print(sentence)
    folder = run_dir / folder_name(scale, changes)
    here = find_data(names, fetching, console, silent)
    if draw_only:
        here |= data_of_runs(folder / "runs")
    where = [f"device={device}"] if device != "auto" else []
    request = Request(scale, here, (*changes, *where), shown_beside)
    made = FigureRuns(request, folder, seeds, chosen, jobs or default_workers(), console, silent, draw_only)

    command = shlex.join(["fedlalr", *sys.argv[1:]])
    drawn = made.draw(names, command)
    failures = made.broken | {run["run"]: run["failure"] for one in drawn for run in one.runs if run["failure"]}
    if as_json:
        print_json(as_plain(made, drawn, failures))
    else:
        show(made, drawn, failures, command)
    if failures:
        raise typer.Exit(FAILED)
    if not any(one.files for one in drawn):
        raise typer.Exit(NO_DATA)


def folder_name(scale: str, overrides: Sequence[str]) -> str:
    """A separate folder for every set of changed settings, so that none overwrites another's runs.

    Device, engine and checkpoint interval are not part of the name.

    >>> folder_name("paper", ["buffers=recalibrate", "engine=stacked", "checkpoint_every=10"])
    'paper-buffers-recalibrate'
    """
    about = sorted(text for text in overrides if key_of(text) not in HOW_RUN)
    name = as_file_name("-".join([scale, *about]))
    if len(name) > LONGEST_NAME:
        name = f"{scale}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name
