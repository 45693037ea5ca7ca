"""`fedlalr compare`: several methods on one problem, over several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedlalr.algorithms.registry import ALGORITHMS, PAPER_METHODS
from fedlalr.cli.compare_plan import PlannedComparison, in_words, parse_variations, reject_other_runs, replacing
from fedlalr.cli.compare_table import Compared, show, write_files
from fedlalr.cli.errors import FAILED, hint_to_repeat
from fedlalr.cli.options import (
    MOST_SEEDS,
    Arguments,
    Jobs,
    Json,
    Quiet,
    at_home,
    check_target,
    fetch_if_needed,
    progress_console,
    split_arguments,
)
from fedlalr.cli.progress import JobsProgress, print_json, standard_output
from fedlalr.cli.run import write_page
from fedlalr.common.files import as_file_name
from fedlalr.common.named import check_known
from fedlalr.config import Config, ConfigError, load
from fedlalr.config.errors import as_config_errors
from fedlalr.config.grid import Choice, choose, qualities, score, without_accuracy
from fedlalr.config.jobs import Job, default_workers, run_jobs
from fedlalr.config.loading import check
from fedlalr.federation.compression.compression import SHORT_FORMS
from fedlalr.report import compare as compare_runs
from fedlalr.report.comparison import Curve
from fedlalr.report.figures import accuracy_figure
from fedlalr.report.losses import losses_table
from fedlalr.report.tables import comparison_table


def compare(
    arguments: Arguments = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas; fedlalr+balanced adds compression.",
            show_default="those the preset has settings for",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=MOST_SEEDS, help="Seeds per method, starting with the configured seed.")
    ] = 3,
    target: Annotated[
        float | None,
        typer.Option(
            help="Target accuracy; rounds, megabytes and seconds are counted up to it.",
            show_default="the preset's, or one that all methods reach",
        ),
    ] = None,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid", help="First tune every method's learning rates on held-out samples, with equally many settings."
        ),
    ] = False,
    grid_seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Seeds per grid setting.")] = 2,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A,B",
            help="Repeat the comparison for every value; repeatable, for all combinations.",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for runs, table and figure.", show_default="runs/compare-PRESET", callback=at_home
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare methods on one problem: final accuracy, and rounds, megabytes and seconds to a target accuracy.

    Runs are written to [bold]DIR/METHOD/seed-N[/]. Finished runs with the same settings are reused. A directory with
    runs of other settings is rejected, but runs with other learning rates that an earlier [bold]--grid[/] chose are
    replaced. The directory also gets [bold]table.md[/], [bold]compare.json[/], [bold]accuracy.png[/],
    [bold]accuracy.svg[/] and [bold]report.html[/]. Change the settings of one method with `methods.NAME.KEY=VALUE`.
    With [bold]--vary[/] every combination of values gets its own folder, and [bold]DIR/table.md[/],
    [bold]DIR/compare.json[/] and [bold]DIR/report.html[/] cover all.

    [bold]Examples[/]

    fedlalr compare quickstart --seeds 3

    fedlalr compare quickstart --methods fedlalr,scaffold partition.alpha=0.1 --target 0.85

    fedlalr compare quickstart --grid --run-dir runs/tuned

    fedlalr compare quickstart --vary partition.alpha=0.1,0.6,10

    fedlalr compare fashion rounds=20 methods.fedavg.lr=0.05 --json

    fedlalr compare model=mypackage.model:make data=mypackage.data:clients --methods fedlalr,fedavg --grid
    """
    source, overrides = split_arguments(arguments)
    reject_algorithm([*overrides, *(vary or [])])
    check_target(target)
    variations = parse_variations(vary or [])
    configs = [load(source, [*overrides, *variation.overrides]) for variation in variations]
    named = [check_methods(methods, config, grid) for config in configs]
    root = run_dir or Path("runs") / f"compare-{configs[0].name}"
    parts = [
        PlannedComparison(variation, config, names, root / as_file_name(variation.label))
        for variation, config, names in zip(variations, configs, named, strict=True)
    ]
    reject_other_runs(parts, seeds, grid_seeds if grid else None)
    console = progress_console(as_json)
    shown = Shown(jobs or default_workers(), root, console, silent=quiet or (as_json and not console.is_terminal))
    shown.tell(in_words(parts, seeds, grid_seeds if grid else None))
    for note in dict.fromkeys(note for part in parts if not grid for note in part.rate_notes()):
        shown.tell(note)

    results: list[Compared] = []
    for i, part in enumerate(parts):
        if part.variation.settings:
            shown.tell(f"variation {i + 1} of {len(parts)}: {part.variation.label}")
        fetch_if_needed(part.config, console, shown.silent)
        config, choices = tune(part, grid_seeds, shown) if grid else (part.config, [])
        results.append(run_all(part, config, choices, seeds, target or config.target, shown))
        write_files(part.folder, results[-1].table.markdown(), results[-1].content())
        if not as_json:
            show(results[-1])
    show_all(results, root, several=bool(vary), as_json=as_json)
    if any(failure for result in results for outcome in result.comparison.outcomes for failure in outcome.failures):
        raise typer.Exit(FAILED)


def show_all(results: Sequence[Compared], root: Path, *, several: bool, as_json: bool) -> None:
    """Write the report and, for several variations, all of them as one table and one JSON file above their folders."""
    plain = results[0].as_plain()
    if several:
        plain = {"variations": [result.as_plain() for result in results], "run_dir": str(root)}
        tables = "\n".join(f"## {result.part.variation.label}\n\n{result.table.markdown()}" for result in results)
        write_files(root, tables, plain)
    report = write_page(root)
    if as_json:
        print_json({**plain, "report": None if report is None else str(report)})
    elif report is not None:
        standard_output().print(f"Report: {report}")


def reject_algorithm(overrides: Sequence[str]) -> None:
    for text in overrides:
        key = text.partition("=")[0]
        if key.split(".")[0] == "algorithm":
            option = key.partition(".")[2] or "lr"
            raise ConfigError(
                f"{text!r} does not say which of the compared methods it is for; choose methods with --methods, "
                f"and change their settings with methods.NAME.{option}=…"
            )


def check_methods(given: str | None, config: Config, grid: bool = False) -> list[str]:
    """The methods to compare; FedLALR first, since colours follow this order."""
    names = (
        list(config.methods) or list(PAPER_METHODS) if given is None else [name.strip() for name in given.split(",")]
    )
    if "" in names:
        raise ConfigError(f"--methods {given!r} contains an empty name; separate names with commas: fedlalr,fedavg")
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"--methods contains {name} twice; to compare its settings, use --vary methods.{name}.KEY=A,B"
            )
        method, plus, compression = name.partition("+")
        with as_config_errors(ValueError):
            check_known("there is no method", method, ALGORITHMS)
            if plus:
                check_known("there is no compressed method", name, [f"{method}+{form}" for form in SHORT_FORMS])
        if plus and grid:
            raise ConfigError(f"--grid tunes methods without compression; remove +{compression} from {name!r}")
    return sorted(names, key=lambda name: (name != "fedlalr", names.index(name)))


@dataclass(frozen=True)
class Shown:
    """How runs are executed and shown."""

    workers: int
    root: Path
    console: Console
    silent: bool

    def tell(self, text: str) -> None:
        if not self.silent:
            self.console.print(text)

    def run(self, jobs: Sequence[Job]) -> None:
        """Run jobs, with a progress bar on a terminal and one line per run elsewhere."""
        with hint_to_repeat(), JobsProgress(self.console, self.root, self.silent) as progress:
            run_jobs(jobs, self.workers, progress.show)


def tune(part: PlannedComparison, seeds: int, shown: Shown) -> tuple[Config, list[Choice]]:
    """The configuration with every method's learning rates set to the best of its grid."""
    config, names = part.config, part.names
    planned = part.tuning(seeds)
    shown.run([job for trial in planned for job in trial.jobs])
    records = [[job.directory.records() for job in trial.jobs] for trial in planned]
    by_loss = without_accuracy(run for runs in records for run in runs)
    scored: dict[str, list[tuple[dict[str, Any], float]]] = {name: [] for name in names}
    for trial, runs in zip(planned, records, strict=True):
        measured = [qualities(run, by_loss) for run in runs]
        scored[trial.method].append((trial.settings, score(measured, config.rounds)))
    choices = [choose(name, scored[name], by_loss) for name in names]
    tree = config.model_dump()
    for choice in choices:
        tree["methods"][choice.method] = {**tree["methods"].get(choice.method, {}), **choice.settings}
        if tree["algorithm"]["name"] == choice.method:
            tree["algorithm"] |= choice.settings
    return check(tree), choices


def edge_notes(choices: Sequence[Choice]) -> list[str]:
    """How to widen the grids whose best rate is at an edge."""
    wider = [f"grid.{one.method}.{rate}=[…]" for one in choices if one.at_edge for rate in one.settings]
    if not wider:
        return []
    return [f"Rates at the edge of their grid: try others with {' '.join(wider)}, equally many for every method."]


def run_all(
    part: PlannedComparison, config: Config, choices: Sequence[Choice], seeds: int, target: float | None, shown: Shown
) -> Compared:
    """Every method with every seed, compared and drawn; without an accuracy, compared by their losses."""
    planned = part.runs(seeds, config)
    jobs = [job for each in planned.values() for job in each]
    if others := replacing(jobs, part.folder):
        shown.tell(others)
    shown.run(jobs)
    runs = {
        name: [Curve(job.directory.records(), (job.directory.summary() or {}).get("failure")) for job in jobs]
        for name, jobs in planned.items()
    }
    settings = {name: jobs[0].config.algorithm.options for name, jobs in planned.items()}
    comparison = compare_runs(runs, settings, target)
    notes = edge_notes(choices) if choices else part.rate_notes()
    if comparison.target is None:
        return Compared(part, comparison, losses_table(comparison).with_notes(notes), choices)
    title = f"{part.figure_title}: {f'mean and range of {seeds} seeds' if seeds > 1 else 'one seed'}"
    pictures = accuracy_figure(runs, part.folder / "accuracy", title, comparison.target)
    return Compared(part, comparison, comparison_table(comparison).with_notes(notes), choices, pictures)
