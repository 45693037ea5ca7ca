"""The output of `fedlalr compare`: chosen learning rates, table, notes and the path of the figure; and its files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fedlalr.cli.compare_plan import PlannedComparison
from fedlalr.cli.progress import standard_output, table
from fedlalr.common.files import write_whole
from fedlalr.config.grid import Choice
from fedlalr.report import Comparison
from fedlalr.report.rerun_command import description_of
from fedlalr.report.tables import Table as Cells


@dataclass(frozen=True)
class Compared:
    """One comparison and its files."""

    part: PlannedComparison
    comparison: Comparison
    table: Cells
    choices: Sequence[Choice]
    pictures: Sequence[Path] = ()

    def as_plain(self) -> dict[str, Any]:
        """The content for `--json`: with the paths of its files."""
        return self.content() | {"run_dir": str(self.part.folder), "figures": [str(path) for path in self.pictures]}

    def content(self) -> dict[str, Any]:
        """The content of `compare.json`."""
        tuned = {
            choice.method: {
                "chosen": choice.settings,
                "score": choice.score,
                "at_edge": choice.at_edge,
                # a setting whose runs failed has no score
                "tried": [
                    {**settings, "score": score if score > -math.inf else None} for settings, score in choice.tried
                ],
            }
            for choice in self.choices
        }
        settings = self.part.variation.settings
        varied = {"settings": settings} if settings else {}
        noted = {"notes": list(self.table.notes)}
        return varied | self.comparison.as_dict() | noted | ({"grid": tuned} if tuned else {})


def write_files(folder: Path, table: str, content: dict[str, Any]) -> None:
    write_whole(folder / "table.md", table)
    write_whole(folder / "compare.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def show(compared: Compared) -> None:
    console, part, cells, choices = standard_output(), compared.part, compared.table, compared.choices
    if choices:
        console.print(
            f"Learning rates chosen from {len(choices[0].tried)} settings per method, on held-out training samples:"
        )
        for choice in choices:
            rates = ", ".join(f"{name} {value:g}" for name, value in choice.settings.items())
            edge = f" (at the edge of the grid: {', '.join(choice.at_edge)})" if choice.at_edge else ""
            quality = f"loss {-choice.score:.4g}" if choice.by_loss else f"accuracy {choice.score:.1%}"
            console.print(f"  {choice.method}: {rates}, {quality}{edge}")
    methods = list(dict.fromkeys(name.partition("+")[0] for name in part.names))
    described = description_of([part.config], methods)
    console.print(laid_out(cells, f"{part.title}: {described}" if described else part.title, console))
    for note in cells.notes:
        console.print(note)
    if compared.pictures:
        console.print(f"Figure: {' and '.join(map(str, compared.pictures))}")


def laid_out(cells: Cells, title: str, console: Console) -> Table:
    """One row per method, or one list per method if the terminal is too narrow for a row."""
    in_rows = table(cells.heading, cells.rows, title)
    if Measurement.get(console, console.options.update(max_width=1000), in_rows).minimum <= console.width:
        return in_rows
    lists = Table(box=None, show_header=False, pad_edge=False, title=title, title_justify="left")
    for name, *values in cells.rows:
        lists.add_row(name, style="bold")
        for heading, value in zip(cells.heading[1:], values, strict=True):
            lists.add_row(f"  {heading}", value)
    return lists
