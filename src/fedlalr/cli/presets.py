"""`fedlalr presets`: list presets, and show their settings."""

from __future__ import annotations

from typing import Annotated

import typer

from fedlalr import config as configuration
from fedlalr.cli.options import WHAT, split_arguments

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar=WHAT, help="What to print (default: the list of presets), and settings to change.", show_default=False
    ),
]


def presets(arguments: Arguments = None) -> None:
    """List the presets or, given one, print all its settings as YAML; KEY=VALUE changes a setting.

    [bold]Examples[/]

    fedlalr presets

    fedlalr presets cifar10 algorithm=fedadam > mine.yaml
    """
    if arguments:
        source, overrides = split_arguments(arguments)
        typer.echo(configuration.dump(configuration.load(source, overrides)), nl=False)
        return
    found = configuration.presets()
    width = max(map(len, found))
    for name, description in found.items():
        typer.echo(f"{name:<{width}}  {description}")
