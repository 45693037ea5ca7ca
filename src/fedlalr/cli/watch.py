"""`fedlalr watch`: the report as a page that follows the runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fedlalr.cli.progress import standard_output
from fedlalr.config import ConfigError
from fedlalr.report.live import LiveServer


def watch(
    places: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Run directories, or directories that contain several; they may still be empty.",
            show_default=False,
        ),
    ],
    port: Annotated[
        int | None, typer.Option(min=1024, max=65535, help="Port of the page.", show_default="a free one")
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show the report of runs while they progress: a page on this machine that updates itself.

    Only browsers on this machine can read it, and it changes nothing. Stop it with Ctrl-C; the runs continue.

    [bold]Examples[/]

    fedlalr watch runs/cifar10

    fedlalr watch runs --port 8000 --open
    """
    for place in places:
        if place.is_file():
            raise ConfigError(f"{place} is a file; give the directory of a run, or of several")
    try:
        server = LiveServer(places, port)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"port {port} cannot be used: {reason}; leave out --port to use a free one") from error
    with server:
        standard_output().print(f"{server.address} shows {', '.join(map(str, places))}; stop with Ctrl-C")
        if open_browser:
            webbrowser.open(server.address)
        server.serve_forever()
