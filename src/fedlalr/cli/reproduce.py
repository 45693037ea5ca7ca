"""`fedlalr reproduce`: a figure of the paper, its data and the verdicts on its claims, with one command."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedlalr.cli.errors import FAILED, NO_DATA, hint_to_repeat
from fedlalr.cli.options import MOST_SEEDS, Json, Quiet, at_home, check_device, progress_console
from fedlalr.common.files import as_file_name

if TYPE_CHECKING:
    from rich.console import Console

    from fedlalr.cli.grid_progress import GridProgress
    from fedlalr.config.jobs import Job
    from fedlalr.paper.figures import Drawn
    from fedlalr.paper.plans import FigurePlan, Request


class FigureName(StrEnum):
    """What can be reproduced."""

    heterogeneity = "heterogeneity"
    cifar = "cifar"
    shakespeare = "shakespeare"
    scalability = "scalability"
    interval = "interval"
    trajectory = "trajectory"
    choices = "choices"
    variants = "variants"
    speedup = "speedup"
    all = "all"


class ScaleName(StrEnum):
    """The size of the experiments."""

    smoke = "smoke"
    paper = "paper"


NEEDS = {
    "heterogeneity": ("cifar10", "cifar100"),
    "cifar": ("cifar10", "cifar100"),
    "scalability": ("cifar10", "cifar100"),
    "interval": ("cifar10", "cifar100"),
    "trajectory": ("cifar10",),
    "choices": ("cifar10",),
    "variants": ("cifar10",),
    "shakespeare": ("shakespeare",),
}
"""Data sets used in the paper."""
REPEATS = 5
"""Minimum number of repetitions of the speed-up, which is cheap."""
LONGEST_NAME = 120


def reproduce(
    figure: Annotated[
        FigureName, typer.Argument(metavar="FIGURE", help=f"{', '.join(FigureName)}.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change in every run.", show_default=False),
    ] = None,
    scale: Annotated[
        ScaleName, typer.Option(help="smoke: small, minutes on two cores. paper: the paper's setting.")
    ] = ScaleName.smoke,
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
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Parallel runs.", show_default="one per processor; one on a GPU")
    ] = None,
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

    Files are written to [bold]RUN_DIR/SCALE[/]; changed settings become part of
    the name. They are the figure as PNG, SVG and PDF, its data as CSV, its
    provenance as JSON, [bold]verdicts.md[/], and all runs under [bold]runs/[/].

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
    from fedlalr.cli.compare import reject_algorithm
    from fedlalr.cli.verdict_table import show
    from fedlalr.config.jobs import default_workers
    from fedlalr.paper.figure_options import check_beside, check_methods, figures_for, split_device
    from fedlalr.paper.figures import FIGURES, write_provenance
    from fedlalr.paper.plans import Request
    from fedlalr.paper.verdicts import save_verdicts

    device, changes = split_device(overrides or (), device)
    reject_algorithm(changes)
    names, left_out = figures_for(list(FIGURES) if figure is FigureName.all else [figure.value], changes)
    chosen, shown_beside = check_methods(methods, names), check_beside(beside or (), names)
    if not draw_only:
        check_device(device)
    console = progress_console(as_json)
    silent = quiet or (as_json and not console.is_terminal)
    fetching = scale is ScaleName.paper and not (offline or draw_only)
    for sentence in left_out:
        console.print(sentence)
    folder = run_dir / folder_name(scale.value, changes)
    here = find_data(names, fetching, console, silent)
    if draw_only:
        here |= data_of_runs(folder / "runs")
    where = [f"device={device}"] if device != "auto" else []
    request = Request(scale.value, here, (*changes, *where), shown_beside)
    made = Making(request, folder, seeds, chosen, jobs or default_workers(), console, silent, draw_only)

    drawn: list[Drawn] = []
    for one in made.figures(names):
        drawn.append(one)
        if one.files:
            write_provenance(one, folder, scale.value, command_line(), draw_only)
            save_verdicts(one.claims, request.verdict_scope, folder)
    failures = made.broken | {run["run"]: run["failure"] for one in drawn for run in one.runs if run["failure"]}
    show(drawn, folder, request, seeds, failures, draw_only, as_json, command_line())
    if failures:
        raise typer.Exit(FAILED)
    if not any(one.files for one in drawn):
        raise typer.Exit(NO_DATA)


class Making:
    """Executes the runs of figures and draws the figures one by one."""

    def __init__(
        self,
        request: Request,
        folder: Path,
        seeds: int,
        methods: Sequence[str],
        workers: int,
        console: Console,
        quiet: bool,
        draw_only: bool,
    ) -> None:
        self.request, self.folder, self.seeds, self.methods = request, folder, seeds, methods
        self.workers, self.console, self.quiet, self.draw_only = workers, console, quiet, draw_only
        self.runs = folder / "runs"
        self.jobs: dict[Path, Job] = {}
        self.broken: dict[str, str] = {}
        """Runs that ended in an unexpected error. These errors are not saved: the next call tries the runs again."""

    def figures(self, names: Sequence[str]) -> Iterable[Drawn]:
        """Yield each figure as soon as its runs are complete, with one progress display."""
        from fedlalr.cli.grid_progress import GridProgress
        from fedlalr.paper.curves import over
        from fedlalr.paper.figures import draw_heterogeneity, draw_runs, plan_of

        plans = {name: plan_of(name, self.request) for name in names}
        for plan in plans.values():
            self.jobs |= {job.folder: job for job in self._jobs(plan)}
        missing = [job for job in self.jobs.values() if not over(job)]
        if not self.quiet and self.jobs:
            self.console.print(f"{len(self.jobs) - len(missing)} of {len(self.jobs)} runs are complete")
        missing = [] if self.draw_only else missing
        with GridProgress(self.console, missing, self.runs, self.quiet) as progress:
            for name, plan in plans.items():
                if plan is not None:
                    self._run([job for job in self._jobs(plan) if job in missing], progress)
                    yield draw_runs(plan, self.folder, self.runs, self.seeds)
                elif name == "heterogeneity":
                    yield draw_heterogeneity(self.request, self.folder, self.seeds)
        if "speedup" in names:
            yield self._speedup()

    def _jobs(self, plan: FigurePlan | None) -> list[Job]:
        return [] if plan is None else plan.jobs(self.runs, self.seeds, self.methods)

    def _run(self, jobs: Sequence[Job], progress: GridProgress) -> None:
        from fedlalr.config.jobs import run_jobs

        waiting = [job for job in jobs if job.folder not in progress.over]  # another figure may have run them
        with hint_to_repeat():
            run_jobs(waiting, self.workers, progress.show, keep_going=True)
        self.broken |= {str(folder.relative_to(self.runs)): reason for folder, reason in progress.failed.items()}

    def _speedup(self) -> Drawn:
        from rich.progress import Progress

        from fedlalr.paper.figures import draw_speedup, measure_speedup
        from fedlalr.paper.speedup import SCALES
        from fedlalr.paper.speedup_results import Speedup

        if self.draw_only:
            return draw_speedup(Speedup.read(self.folder), self.folder)
        shown = self.console.is_terminal and not self.quiet
        if not shown and not self.quiet:
            self.console.print("speed-up: measuring on a synthetic problem")
        with Progress(console=self.console, transient=True, disable=not shown) as bar:
            task = bar.add_task("speed-up", total=SCALES[self.request.scale].work)
            return measure_speedup(
                self.request.scale, self.folder, max(REPEATS, self.seeds), lambda steps: bar.advance(task, steps)
            )


def find_data(figures: Sequence[str], fetching: bool, console: Console, quiet: bool) -> frozenset[str]:
    """The data sets on this machine, after fetching those that the figures need."""
    from fedlalr.cli.progress import fetch_progress
    from fedlalr.data import sources
    from fedlalr.data.sources import DataNotFound

    here = {data.name for data in sources.available() if data.where is not None}
    wanted = dict.fromkeys(name for figure in figures for name in NEEDS.get(figure, ()))
    for name in wanted if fetching else ():
        if name not in here:
            try:
                with fetch_progress(console, quiet) as progress:
                    sources.fetch(name, progress=progress)
                here.add(name)
            except DataNotFound as error:
                if not quiet:
                    console.print(f"{name} cannot be fetched and is skipped: {error}")
    return frozenset(here)


def data_of_runs(runs: Path) -> frozenset[str]:
    """The data sets of existing runs: drawing these does not need the data."""
    from fedlalr.paper.settings import TITLES

    return frozenset(name for name in TITLES if any(runs.glob(f"{name}-*")))


def folder_name(scale: str, overrides: Sequence[str]) -> str:
    """A separate folder for every set of changed settings, so that none overwrites another's runs.

    Device, engine and checkpoint interval are not part of the name.

    >>> folder_name("paper", ["buffers=recalibrate", "engine=stacked", "checkpoint_every=10"])
    'paper-buffers-recalibrate'
    """
    from fedlalr.paper.plans import HOW_RUN, key_of

    about = sorted(text for text in overrides if key_of(text) not in HOW_RUN)
    name = as_file_name("-".join([scale, *about]))
    if len(name) > LONGEST_NAME:
        name = f"{scale}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name


def command_line() -> str:
    return shlex.join(["fedlalr", *sys.argv[1:]])
