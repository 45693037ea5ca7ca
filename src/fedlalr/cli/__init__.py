"""The command line: parses, calls, prints. Each command is a module here; add it to `COMMANDS` or `GROUPS`."""

from __future__ import annotations

import gc
import io
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated

import typer

import fedlalr.public  # noqa: F401 - before the memory is frozen
from fedlalr.cli import (
    bench,
    compare,
    data,
    doctor,
    flower,
    presets,
    privacy,
    report,
    reproduce,
    resume,
    run,
    theory,
    watch,
)
from fedlalr.cli.command import Command
from fedlalr.cli.errors import Commands

COMMANDS: dict[str, Callable[..., None]] = {
    "run": run.run,
    "resume": resume.resume,
    "compare": compare.compare,
    "reproduce": reproduce.reproduce,
    "report": report.report,
    "watch": watch.watch,
    "privacy": privacy.privacy,
    "theory": theory.theory,
    "presets": presets.presets,
    "bench": bench.bench,
    "doctor": doctor.doctor,
}
GROUPS = {"data": data.app, "flower": flower.app}

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    suggest_commands=find_spec("typer._click") is not None,  # an older Typer uses click, which suggests by itself
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from fedlalr import __version__

        print(f"fedlalr {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 success, 1 a run failed, 2 invalid command or setting, 3 data not found or corrupt, "
    "130 interrupted, 143 terminated."
)
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Federated optimisation with client-specific adaptive learning rates."""
    if os.path.expanduser("~") == "~" and "MPLCONFIGDIR" not in os.environ:  # Matplotlib below 3.11 needs a home
        os.environ["MPLCONFIGDIR"] = context.with_resource(tempfile.TemporaryDirectory())


for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


def main() -> None:
    """The console script `fedlalr`."""
    gc.freeze()  # imported modules live until the end; scanning them for garbage takes half a second
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed: the run's next file would get its descriptor, and all output
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the end
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot print √ shows a ? instead of failing
    app()
