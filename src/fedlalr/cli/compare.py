"""`fedlalr compare`: several methods on one problem, over several seeds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlalr.cli.errors import FAILED
from fedlalr.cli.options import Arguments, Json, Quiet, fetch_if_needed, progress_console, split_arguments

if TYPE_CHECKING:
    from rich.console import Console

    from fedlalr.config import Config
    from fedlalr.config.grid import Choice
    from fedlalr.config.jobs import Job
    from fedlalr.report import Comparison

PAPER = ("fedlalr", "fedavg", "fedadam", "fedamsv1", "fedamsv2", "lafedopt")


def compare(
    arguments: Arguments = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Methods, with commas between them.", show_default="those the preset has settings for"),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each method; seeds count up from the configuration's.")
    ] = 3,
    target: Annotated[
        float | None,
        typer.Option(
            help="Accuracy to count rounds and megabytes to.", show_default="the preset's, or one that all reach"
        ),
    ] = None,
    grid: Annotated[
        bool,
        typer.Option("--grid", help="First tune every method's rates, by equally many settings on held-out samples."),
    ] = False,
    grid_seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting of the grid.")] = 2,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time.", show_default="one for each processor; one on a GPU")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where runs, table and figure go.", show_default="runs/compare-PRESET")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare methods on one problem: final accuracy, rounds and megabytes to a target accuracy, seconds.

    Runs lie in [bold]DIR/METHOD/seed-N[/]; finished ones of the same settings are used again. The directory also gets
    [bold]table.md[/], [bold]compare.json[/], [bold]accuracy.png[/] and [bold]accuracy.svg[/].
    Settings of one method are changed by `methods.NAME.KEY=VALUE`.

    [bold]Examples[/]

      fedlalr compare quickstart --seeds 3
      fedlalr compare quickstart --methods fedlalr,scaffold partition.alpha=0.1 --target 0.85
      fedlalr compare quickstart --grid --run-dir runs/tuned
      fedlalr compare fashion rounds=20 methods.fedavg.lr=0.05 --json
    """
    from fedlalr import config as configuration
    from fedlalr.config.jobs import default_workers

    source, overrides = split_arguments(arguments)
    refuse_algorithm(overrides)
    config = configuration.load(source, overrides)
    names = check_methods(methods, config)
    if target is not None and not 0 < target <= 1:
        raise configuration.ConfigError(f"--target is an accuracy above 0 and up to 1, not {target:g}")
    folder = run_dir or Path("runs") / f"compare-{config.name}"
    console = progress_console(as_json)
    silent = quiet or (as_json and not console.is_terminal)
    fetch_if_needed(config, console, silent)
    workers = jobs or default_workers()

    choices: list[Choice] = []
    if grid:
        config, choices = tune(config, names, grid_seeds, folder / "grid", workers, console, silent)
    comparison, pictures = run_all(config, names, seeds, target or config.target, folder, workers, console, silent)
    write(comparison, choices, folder)
    if as_json:
        plain = as_plain(comparison, choices)
        print(json.dumps(plain | {"run_dir": str(folder), "figures": [str(p) for p in pictures]}, ensure_ascii=False))
    else:
        show(config, comparison, choices, pictures)
    if any(failure for outcome in comparison.outcomes for failure in outcome.failures):
        raise typer.Exit(FAILED)


def refuse_algorithm(overrides: Sequence[str]) -> None:
    from fedlalr.config import ConfigError

    for text in overrides:
        key = text.partition("=")[0]
        if key.split(".")[0] == "algorithm":
            option = key.partition(".")[2] or "lr"
            raise ConfigError(
                f"{text!r} names no method of several; choose them with --methods, and write methods.NAME.{option}=…"
            )


def check_methods(given: str | None, config: Config) -> list[str]:
    """The methods to compare; FedLALR first, as the order of colours."""
    from fedlalr.algorithms.registry import ALGORITHMS
    from fedlalr.config import ConfigError
    from fedlalr.config.errors import hint, listed

    names = [name.strip() for name in given.split(",")] if given else list(config.methods) or list(PAPER)
    for name in names:
        if name not in ALGORITHMS:
            raise ConfigError(
                f"there is no method {name!r}; choose from {listed(list(ALGORITHMS))}.{hint(name, ALGORITHMS)}"
            )
    return sorted(dict.fromkeys(names), key=lambda name: (name != "fedlalr", names.index(name)))


def tune(
    config: Config, names: Sequence[str], seeds: int, folder: Path, workers: int, console: Console, silent: bool
) -> tuple[Config, list[Choice]]:
    """The configuration with every method's rates set to the best of its grid."""
    from fedlalr.config.grid import choose, score, trials
    from fedlalr.config.loading import check

    planned = trials(config, names, seeds, folder)
    run_shown([job for trial in planned for job in trial.jobs], workers, folder, console, silent)
    scored: dict[str, list[tuple[dict[str, Any], float]]] = {name: [] for name in names}
    for trial in planned:
        accuracies = [[record.accuracy for record in job.directory.records()] for job in trial.jobs]
        scored[trial.method].append((trial.settings, score(accuracies, config.rounds)))
    choices = [choose(name, scored[name]) for name in names]
    tree = config.model_dump()
    for choice in choices:
        tree["methods"][choice.method] = {**tree["methods"].get(choice.method, {}), **choice.settings}
        if tree["algorithm"]["name"] == choice.method:
            tree["algorithm"] |= choice.settings
    return check(tree), choices


def run_all(
    config: Config,
    names: Sequence[str],
    seeds: int,
    target: float | None,
    folder: Path,
    workers: int,
    console: Console,
    silent: bool,
) -> tuple[Comparison, list[Path]]:
    """Every method with every seed, compared and drawn."""
    from fedlalr.config import with_method
    from fedlalr.config.jobs import Job
    from fedlalr.report import compare as compare_runs
    from fedlalr.report.comparison import Curve
    from fedlalr.report.figures import accuracy_figure

    planned = {
        name: [
            Job(with_method(config, name, seed=seed), folder / name / f"seed-{seed}")
            for seed in range(config.seed, config.seed + seeds)
        ]
        for name in names
    }
    run_shown([job for jobs in planned.values() for job in jobs], workers, folder, console, silent)
    runs = {
        name: [Curve(job.directory.records(), (job.directory.summary() or {}).get("failure")) for job in jobs]
        for name, jobs in planned.items()
    }
    settings = {name: jobs[0].config.algorithm.options for name, jobs in planned.items()}
    comparison = compare_runs(runs, settings, target)
    title = f"{config.name}: {seeds} seed{'s' if seeds > 1 else ''}" + (", mean and range" if seeds > 1 else "")
    return comparison, accuracy_figure(runs, folder / "accuracy", title, comparison.target)


def run_shown(jobs: Sequence[Job], workers: int, root: Path, console: Console, silent: bool) -> None:
    """Run jobs with a bar on a terminal and a line for each elsewhere."""
    from fedlalr.cli.progress import JobsProgress
    from fedlalr.config.jobs import run_jobs

    with JobsProgress(console, root, silent) as progress:
        run_jobs(jobs, workers, progress.show)


def as_plain(comparison: Comparison, choices: Sequence[Choice]) -> dict[str, Any]:
    tuned = {
        choice.method: {
            "chosen": choice.settings,
            "score": choice.score,
            "at_edge": choice.at_edge,
            # a setting whose runs failed has no score
            "tried": [{**settings, "score": score if score > 0 else None} for settings, score in choice.tried],
        }
        for choice in choices
    }
    return comparison.as_dict() | ({"grid": tuned} if tuned else {})


def write(comparison: Comparison, choices: Sequence[Choice], folder: Path) -> None:
    from fedlalr.report.tables import comparison_table

    (folder / "table.md").write_text(comparison_table(comparison).markdown(), encoding="utf-8")
    plain = json.dumps(as_plain(comparison, choices), indent=2, ensure_ascii=False)
    (folder / "compare.json").write_text(plain + "\n", encoding="utf-8")


def show(config: Config, comparison: Comparison, choices: Sequence[Choice], pictures: Sequence[Path]) -> None:
    from rich import box
    from rich.table import Table

    from fedlalr.cli.progress import standard_output
    from fedlalr.report.tables import comparison_table

    console = standard_output()
    if choices:
        console.print(
            f"Rates chosen from {len(choices[0].tried)} settings of each method, on held-out training samples:"
        )
        for choice in choices:
            rates = ", ".join(f"{name} {value:g}" for name, value in choice.settings.items())
            edge = f" (at the edge of the grid: {', '.join(choice.at_edge)})" if choice.at_edge else ""
            console.print(f"  {choice.method}: {rates}, accuracy {choice.score:.1%}{edge}")
    cells = comparison_table(comparison)
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=f"{config.name}: {config.description}", title_justify="left"
    )
    for i, heading in enumerate(cells.heading):
        table.add_column(heading, justify="left" if i == 0 else "right")
    for row in cells.rows:
        table.add_row(*row)
    console.print(table)
    for note in cells.notes:
        console.print(note)
    console.print(f"Figure: {' and '.join(map(str, pictures))}")
