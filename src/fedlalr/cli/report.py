"""`fedlalr report`: an HTML page about runs, to read and to share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedlalr.cli.files import check_figure, writing
from fedlalr.cli.options import Places, check_target
from fedlalr.cli.progress import standard_output
from fedlalr.config import ConfigError
from fedlalr.config.run_dir import REPORT_FILE
from fedlalr.report.figures import bytes_figure
from fedlalr.report.html import write_report


def report(
    places: Places,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page to write.", show_default="report.html in the first directory"),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            "--figure",
            help="Draw accuracy (or loss) against megabytes up, down and both instead, as PNG and SVG, or as PDF.",
            show_default=False,
        ),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="The figure's title.", show_default=False)] = "",
    target: Annotated[
        float | None,
        typer.Option(
            help="The figure names the line that reaches this accuracy with the fewest megabytes.",
            show_default="one that all methods come near",
        ),
    ] = None,
) -> None:
    """Write an HTML report on runs: curves, clients, partition, rejected replies, timing, and how to repeat them.

    The page is one self-contained file and needs no network. Runs that differ only in their seed are drawn as one line
    with its range. Trajectories are shown if a run recorded them.

    [bold]Examples[/]

    fedlalr report runs/cifar10

    fedlalr report runs/demo -o demo.html

    fedlalr report runs/fedavg runs/fedlalr -o both.html

    fedlalr report runs/demo --figure megabytes.png --target 0.9
    """
    check_target(target)
    if figure is not None:
        if output is not None:
            raise ConfigError("--output names a page, and --figure draws a figure instead; give one of the two")
        check_figure(figure, "--figure")
        with writing(figure, "--figure"):
            standard_output().print(f"written to {' and '.join(map(str, bytes_figure(places, figure, title, target)))}")
        return
    page = output or places[0] / REPORT_FILE
    if page.is_dir():
        raise ConfigError(f"--output {page} is a folder; name the page in it, such as {page / 'report.html'}")
    with writing(page, "--output"):
        written = write_report(places, page)
    standard_output().print(f"written to {written}")
