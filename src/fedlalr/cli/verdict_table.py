"""The output of `fedlalr reproduce`: claims with their statements, definitions, and paths of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedlalr.cli.figure_runs import FigureRuns
from fedlalr.cli.progress import standard_output
from fedlalr.paper.figures import Drawn, running
from fedlalr.paper.verdicts import DEFINITIONS, Claim, seeds_in_words
from fedlalr.report.tables import alike


def show(made: FigureRuns, drawn: Sequence[Drawn], failures: Mapping[str, str], command: str) -> None:
    claims, folder = [claim for one in drawn for claim in one.claims], made.folder

    console = standard_output()
    claims.sort(key=lambda claim: claim.key)
    for claim in claims:
        show_claim(claim, console)
    if claims:
        console.print(
            "\n".join([*made.request.verdict_scope, "Definitions:", *(f"  {definition}" for definition in DEFINITIONS)])
        )
    for note in dict.fromkeys(note for one in drawn for note in one.notes):
        console.print(note)
    for runs, reason in alike(failures.items()):
        console.print(f"failed: {', '.join(runs)}: {reason}")
    for one in drawn:
        place = (
            f"{', '.join(path.name for path in one.files)} in {folder}" if one.files else why_none(one, made.draw_only)
        )
        console.print(f"{one.figure}: {place}")
    for one in drawn:
        if one.files and one.planned:
            console.print(f"{one.figure}: {len(one.planned)} planned, not run: {', '.join(one.planned)}")
            console.print(f"  {running(command)}", soft_wrap=True)
    for one in drawn:
        if one.numbers:
            show_numbers(one, console)
    if claims:
        if (folder / "verdicts.md").is_file():
            console.print(f"Verdicts: {folder / 'verdicts.md'}")
        show_verdicts(claims, console)


def why_none(one: Drawn, draw_only: bool) -> str:
    if one.lacks == "data":
        return "no figure, its data set is missing"
    return "nothing to draw yet; run it without --draw-only" if draw_only else "no figure, no run is finished"


def show_numbers(one: Drawn, console: Console) -> None:
    """Show the curves of a figure that the paper makes no claim about, as numbers."""
    several = any(len(numbers.seeds) > 1 for numbers in one.numbers)
    title = f"{one.figure}, mean ± standard deviation over the seeds" if several else one.figure
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True, title=title, title_justify="left")
    headings = ("compared", "line", "early accuracy, %", "final accuracy, %", "largest fall, points", "MB up", "seeds")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if 2 <= i <= 5 else "left")
    for row in one.numbers:
        table.add_row(
            row.panel,
            row.line,
            points(row.early_accuracy, row.early_accuracy_std),
            points(row.final_accuracy, row.final_accuracy_std),
            points(row.largest_fall, row.largest_fall_std),
            f"{row.megabytes_up:,.1f}",
            seeds_in_words(row.seeds),
        )
    console.print(table)


def points(share: float, deviation: float | None) -> str:
    """
    >>> points(0.7961, None), points(0.7961, 0.012)
    ('79.6', '79.6 ± 1.2')
    """
    return f"{share * 100:.1f}" + ("" if deviation is None else f" ± {deviation * 100:.1f}")


def show_claim(claim: Claim, console: Console) -> None:
    """Show a claim with its verdict, and its statements below."""
    console.print(Text.assemble((f"Claim {claim.key}", "bold"), f" {claim.text}"))
    console.print(f"  {claim.summary}", style="bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    for heading, ratio in (("statement", 4), ("where", 3), ("measured", 5), ("seeds", 1), ("verdict", 2)):
        table.add_column(heading, ratio=ratio, overflow="fold")
    for check in claim.checks:
        reading = f"{check.reading}: " if check.reading else ""
        table.add_row(
            reading + check.statement, check.where, check.measured, seeds_in_words(check.seeds), check.verdict
        )
    if claim.checks:
        console.print(table)


def show_verdicts(claims: Sequence[Claim], console: Console) -> None:
    """Show all claims in one table, one or two lines each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=True)
    table.add_column("claim")
    table.add_column("the paper's claim", ratio=5)
    table.add_column("seeds")
    table.add_column("verdict", ratio=3)
    for claim in claims:
        seeds = sorted({seed for check in claim.checks for seed in check.seeds})
        table.add_row(claim.key, claim.text, seeds_in_words(seeds), claim.summary)
    console.print(table)


def as_plain(made: FigureRuns, drawn: Sequence[Drawn], failures: Mapping[str, str]) -> dict[str, Any]:
    claims = [claim for one in drawn for claim in one.claims]
    return {
        "scale": made.request.scale,
        "seeds": made.seeds,
        "run_dir": str(made.folder),
        "files": {one.figure: [str(path) for path in one.files] for one in drawn},
        "notes": {one.figure: one.notes for one in drawn},
        "numbers": {one.figure: [asdict(row) for row in one.numbers] for one in drawn if one.numbers},
        "planned": {one.figure: one.planned for one in drawn if one.planned},
        "claims": [{"text": claim.text, "verdict": claim.summary, **asdict(claim)} for claim in claims],
        "failed": [{"run": run, "reason": reason} for run, reason in failures.items()],
    }
