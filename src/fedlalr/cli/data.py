"""`fedlalr data`: list, fetch and inspect data sets and their partitions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedlalr.cli.command import Command
from fedlalr.cli.files import check_figure, writing
from fedlalr.cli.options import Json, Quiet, progress_console
from fedlalr.cli.progress import fetch_progress, print_json, standard_output
from fedlalr.common.named import check_known
from fedlalr.config.errors import as_config_errors
from fedlalr.data import load, sources
from fedlalr.data.heterogeneity import count_labels, draw, summarise

app = typer.Typer(no_args_is_help=True, help="List, fetch and inspect data sets.")

Name = Annotated[str, typer.Argument(help="A data set; see `fedlalr data list`.")]


@app.command("list", cls=Command)
def list_(as_json: Json = False) -> None:
    """List all data sets, and where they are on this machine."""
    found = sources.available()
    if as_json:
        print_json([asdict(data) for data in found])
        return
    table = Table(box=None, pad_edge=False)
    for column in ("name", "train", "test", "classes", "what", "where"):
        table.add_column(column, justify="right" if column in ("train", "test", "classes") else "left", overflow="fold")
    for data in found:
        where = data.where or f"not found; run fedlalr data fetch {data.name}"
        table.add_row(data.name, f"{data.train:,}", f"{data.test:,}", str(data.classes), data.description, where)
    standard_output().print(table)


@app.command(cls=Command)
def fetch(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Fetch again even if it exists.")] = False,
    quiet: Quiet = False,
) -> None:
    """Download a data set into the cache and verify it.

    [bold]Example[/]   fedlalr data fetch fashion
    """
    check_name(name)
    console = progress_console(as_json=False)
    with fetch_progress(console, quiet) as progress:
        where = sources.fetch(name, progress=progress, force=force)
    standard_output().print(f"{name}: {where}")


@app.command(cls=Command)
def show(
    name: Name,
    partition: Annotated[
        str,
        typer.Option(
            help="Partition of the samples over clients: dirichlet, dirichlet-classes, iid, shards, lognormal, natural."
        ),
    ] = "dirichlet",
    alpha: Annotated[float, typer.Option(help="Concentration of the Dirichlet schemes: smaller is more skewed.")] = 0.3,
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 100,
    classes_per_client: Annotated[
        int | None, typer.Option(help="Classes per client, for shards.", show_default="2")
    ] = None,
    sigma: Annotated[
        float | None, typer.Option(help="Spread of the client sizes, for lognormal.", show_default="1.0")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Folder with the data set in its original format.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Figure to write (.png, .svg, .pdf).", show_default="NAME-PARTITION.png")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Describe a data set, partition it over clients, and draw the label distribution.

    [bold]Example[/]   fedlalr data show cifar10 --partition dirichlet --alpha 0.3
    """
    check_name(name)
    skew = f" {alpha:g}" if partition.startswith("dirichlet") else ""
    picture = output or Path(f"{name}-{partition}{skew.replace(' ', '-')}.png")
    check_figure(output, "--output")
    with fetch_progress(progress_console(as_json), quiet or as_json) as progress:
        described = sources.describe(name, folder=folder, progress=progress)
    own: dict[str, Any] = {"classes_per_client": classes_per_client, "sigma": sigma}
    given = {option: value for option, value in own.items() if value is not None}
    with as_config_errors(ValueError, TypeError):
        population = load(name, clients, partition, alpha, seed, folder=folder, **given)
    counts = count_labels(population.targets.numpy(), population.partition, population.classes)
    summary = summarise(counts)
    with writing(picture, "--output"):
        draw(counts, picture, f"{name}, {partition}{skew}")
    if as_json:
        facts = {"name": name, "source": described.source, "partition": partition, "picture": str(picture)}
        print_json(facts | asdict(summary))
        return
    console = standard_output()
    console.print(f"{described.name}: {described.description}\nfrom {described.source}")
    for title, value in described.facts:
        console.print(f"  {title}: {value}")
    console.print(f"{partition}{skew}, {len(population.partition)} clients, seed {seed}")
    for line in summary.lines():
        console.print(f"  {line}")
    console.print(f"Figure: {picture}")


def check_name(name: str) -> None:
    with as_config_errors(ValueError):
        check_known("there is no data set", name, sources.SOURCES)
