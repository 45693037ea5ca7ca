"""`fedlalr run`: run one configuration once."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedlalr import config as configuration
from fedlalr.cli.errors import InterruptShown
from fedlalr.cli.files import writing
from fedlalr.cli.options import (
    Arguments,
    Debug,
    Json,
    Quiet,
    RunDir,
    Track,
    fetch_if_needed,
    progress_console,
    split_arguments,
    tracked,
)
from fedlalr.cli.progress import print_json, standard_output
from fedlalr.common.files import as_file_name
from fedlalr.common.printable import complain, plain_warnings
from fedlalr.config import Config, ConfigError, RunDirectory
from fedlalr.config.run_dir import REPORT_FILE
from fedlalr.federation import Observer
from fedlalr.federation.progress import RunProgress, duration, megabytes
from fedlalr.federation.record import Record, distributions_in, loss_name, over_clients
from fedlalr.federation.stragglers import remedy
from fedlalr.report.html import write_report
from fedlalr.training.ranks import process_rank

RUNS = Path("runs")
LONGEST_NAME = 120
"""Maximum number of bytes of the run's name in the name of its folder."""


def run(
    arguments: Arguments = None,
    run_dir: RunDir = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the directory.")] = False,
    track: Track = None,
    debug: Debug = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one method on one problem.

    PRESET is a preset's name, a YAML file or a run directory; the default is `quickstart`. KEY=VALUE changes a setting.
    For your own problem, `model` and `data` name functions; modules in the current directory are found.
    The run directory gets [bold]config.yaml[/] (all settings: `fedlalr run DIR/config.yaml` repeats the run),
    [bold]metrics.jsonl[/] (one line per round), [bold]checkpoint/[/], [bold]summary.json[/] and, at the end,
    [bold]report.html[/].

    [bold]Examples[/]

    fedlalr run

    fedlalr run quickstart algorithm=fedadam algorithm.lr=0.03 partition.alpha=0.1 rounds=20

    fedlalr run cifar10 partition.alpha=0.3 seed=1 --run-dir runs/cifar10

    fedlalr run my.yaml --json > summary.json

    fedlalr run my.yaml --track tensorboard

    fedlalr run model=mypackage.model:make data=mypackage.data:clients rounds=20
    """
    source, overrides = split_arguments(arguments)
    config = configuration.load(source, overrides)
    if process_rank() > 0:  # under torchrun only the first process writes and shows progress
        configuration.execute(config)
        return
    console = progress_console(as_json)
    note_defaults(config, console, quiet or as_json)
    fetch_if_needed(config, console, quiet)
    with (
        new_folder(config) if run_dir is None else nullcontext(run_dir) as folder,
        tracked(track, config, folder) as trackers,
    ):
        run_shown(config, folder, trackers, console, quiet, as_json, overwrite=overwrite, debug=debug)


def run_shown(
    config: Config,
    folder: Path,
    trackers: Sequence[Observer],
    console: Console,
    quiet: bool,
    as_json: bool,
    **how: bool,
) -> None:
    """Run with progress, then show the summary, also after an interrupt. `how` is passed to `execute`."""
    silent = quiet or (as_json and not console.is_terminal)
    try:
        with plain_warnings(), RunProgress(console, silent) as progress:
            told = () if how["debug"] else (FirstRejection(),)
            configuration.execute(config, folder, [progress, *trackers, *told], **how)
    except KeyboardInterrupt:
        if show(folder, as_json):
            raise InterruptShown from None
        raise
    write_page(folder)
    show(folder, as_json)


class FirstRejection(Observer):
    """Says once why a reply was rejected."""

    told = False

    def on_round(self, record: Record) -> None:
        if record.rejected and not self.told:
            self.told = True
            client, reason = record.rejected[0]
            complain(
                f"warning: round {record.round} rejected the reply of client {client} ({reason}); "
                f"{remedy(reason, '--debug')}"
            )


def write_page(folder: Path) -> Path | None:
    """Write the report of finished runs. Failing to write it is only a warning: the runs themselves are complete."""
    try:
        return write_report([folder], folder / REPORT_FILE)
    except (OSError, ConfigError) as error:  # the latter if no run has a record
        complain(f"warning: no report was written ({error}); write it with: fedlalr report {shlex.quote(str(folder))}")
        return None


@contextmanager
def new_folder(config: Config) -> Iterator[Path]:
    """A folder that no other run has, even one started in the same second. Removed if the run wrote nothing."""
    name = as_file_name(config.name).strip(".").encode()[:LONGEST_NAME].decode(errors="ignore")  # may look like a path
    place = RUNS / f"{name or 'run'}-{config.algorithm.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    with writing(RUNS, "--run-dir"):
        RUNS.mkdir(exist_ok=True)
        for folder in chain([place], (place.with_name(f"{place.name}-{number}") for number in count(2))):
            with suppress(FileExistsError):
                folder.mkdir()
                break
    try:
        yield folder
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def note_defaults(config: Config, console: Console, quiet: bool) -> None:
    """Print a note if a preset has settings for some methods, but not for the chosen one."""
    method = config.algorithm.name
    if config.methods and method not in config.methods and not quiet:
        console.print(
            f"{config.name} has no settings for {method}: using the method's defaults for settings you did not give"
        )


def show(folder: Path, as_json: bool) -> bool:
    """Show the outcome of a run, read from its directory. Returns whether it reported an interrupt to the user."""
    directory = RunDirectory(folder)
    summary = directory.summary()
    if summary is None:  # interrupted before it started
        return False
    if as_json:
        print_json({**summary, "run_dir": str(folder)})
        return False
    standard_output().print("\n".join(in_words(summary, directory.records(), folder)))
    return bool(summary["status"] == "interrupted")


def outcome(summary: dict[str, Any], records: Sequence[Record]) -> str:
    """Accuracy, loss and number of rounds."""
    accuracy, best, rounds = summary["accuracy"], summary["best_accuracy"], summary["rounds"]
    if not records:
        return "no round was finished"
    measured = "" if accuracy is None else f"accuracy {accuracy:.1%} (best {best:.1%}), "
    measured += over_clients(distributions_in(summary.get("per_client", {})))
    name = loss_name(records[-1])
    loss = f"no finite {name}" if summary["loss"] is None else f"{name} {summary['loss']:.3f}"
    if summary.get("epsilon") is not None:
        loss += f", epsilon {summary['epsilon']:.3g}"
    return f"{measured}{loss} after {rounds} round{'' if rounds == 1 else 's'}"


def cost(summary: dict[str, Any]) -> str:
    """Bytes, time and rejected replies."""
    rejected = f"; {summary['rejected']} replies rejected" if summary["rejected"] else ""
    sent = f"{megabytes(summary['bytes_up'])} up, {megabytes(summary['bytes_down'])} down"
    return f"{sent}, {duration(summary['seconds'])}{rejected}"


def in_words(summary: dict[str, Any], records: Sequence[Record], folder: Path) -> list[str]:
    interrupted = summary["status"] == "interrupted"
    return [
        f"{summary['name']} with {summary['algorithm']['name']}: {outcome(summary, records)}",
        f"{cost(summary)}; written to {folder}",
        *([f"interrupted; resume with: fedlalr resume {shlex.quote(str(folder))}"] if interrupted else []),
    ]
