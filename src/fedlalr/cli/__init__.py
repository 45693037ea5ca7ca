"""The command line: parses, calls, prints.

Each command is a function in a module of its name; add it to `COMMANDS`, or a group of commands to `GROUPS`.
"""

from __future__ import annotations

import gc
import io
import os
import sys
import tempfile
from importlib.util import find_spec
from typing import Annotated

import typer

from fedlalr.cli import data, flower
from fedlalr.cli.bench import bench
from fedlalr.cli.command import Command
from fedlalr.cli.compare import compare
from fedlalr.cli.doctor import doctor
from fedlalr.cli.errors import Commands
from fedlalr.cli.presets import presets
from fedlalr.cli.privacy import privacy
from fedlalr.cli.report import report
from fedlalr.cli.reproduce import reproduce
from fedlalr.cli.resume import resume
from fedlalr.cli.run import run
from fedlalr.cli.theory import theory
from fedlalr.cli.watch import watch

COMMANDS = (run, resume, compare, reproduce, report, watch, privacy, theory, presets, bench, doctor)
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


for _command in COMMANDS:
    app.command(cls=Command)(_command)
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
