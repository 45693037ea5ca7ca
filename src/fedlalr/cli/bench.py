"""`fedlalr bench`: the time of a round on this machine, relative to a plain loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlalr.algorithms import registry
from fedlalr.benchmark import GPU_JOBS, JOBS, ours, plain_loop, race
from fedlalr.benchmark.results import as_dict, plot_races, report
from fedlalr.cli.files import check_figure, writing
from fedlalr.cli.options import Json, Quiet, check_device, progress_console
from fedlalr.cli.progress import print_json, standard_output
from fedlalr.common.checks import check_choice
from fedlalr.config.errors import as_config_errors
from fedlalr.training.engines.registry import check_engine


def bench(
    jobs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Benchmarks to run: cnn, lstm, logistic, perceptron, gpt, lora; on a GPU convmixer, charlstm, "
            "densecnn, gpt-small, gpt-medium, gpt2-lora.",
            show_default="all for the device",
        ),
    ] = None,
    engines: Annotated[str, typer.Option(help="Engines, separated by commas.")] = "auto",
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "fedavg,fedlalr",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each contestant.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the fedlalr process; the plain loop uses one.")] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Figure to write (.png, .svg, .pdf).", show_default="no figure")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Time a round against federated averaging written as a plain loop.

    The contestants take turns, each in a separate process, and the result is the ratio of their times, so that other
    load on the machine has little effect. Nothing is evaluated or written while timing.

    [bold]Examples[/]

    fedlalr bench

    fedlalr bench cnn --engines workers,reference --rounds 9 --plot bench.png

    fedlalr bench --device cuda
    """
    names, chosen_methods = ([name.strip() for name in given.split(",")] for given in (engines, methods))
    check_device(device)
    check_figure(plot, "--plot")
    known = JOBS | GPU_JOBS
    chosen = jobs or list(JOBS if device == "cpu" else GPU_JOBS)
    with as_config_errors(ValueError):
        for name in names:
            check_engine(name)
        for method in chosen_methods:
            registry.create(method)
        for job in chosen:
            check_choice("a job", job, tuple(known))

    console = progress_console(as_json)
    races = {}
    for job in chosen:
        mine = [ours(job, name, method, threads, device) for name in names for method in chosen_methods]
        contestants = [plain_loop(job, device), *mine]
        if not quiet:
            console.print(f"{job}: {known[job].title}, {', '.join(contestant.name for contestant in contestants)}")
        races[job] = race(contestants, rounds)
    if plot is not None:
        with writing(plot, "--plot"):
            plot_races(races, plot)
    if as_json:
        print_json(as_dict(races, device))
    else:
        standard_output().print(report(races, threads, device))
