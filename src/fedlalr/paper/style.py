"""Style and saving of the paper's figures, sized for one column with readable type, and of their tables."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from fedlalr.common.files import write_whole
from fedlalr.report import figures

WIDTH = 3.5
"""Width of a column in inches."""
STYLE = {
    "font.size": 8,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "pdf.fonttype": 42,
}


def save(draw: Callable[[], Figure], path: Path) -> list[Path]:
    """Draw in the style of a paper and write `path`.png, .svg and .pdf; the same figure gives the same bytes."""
    with mpl.rc_context(STYLE):  # type: ignore[arg-type]
        return figures.save(draw(), path, ("png", "svg", "pdf"), dpi=300)


def write_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a table as CSV."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([columns, *rows])
    write_whole(path, text.getvalue())
    return path


def add_notes(figure: Figure, notes: Iterable[str]) -> Figure:
    """Add notes for the reader at the foot of a figure."""
    text = textwrap.fill(" ".join(notes), 86)
    figure.supxlabel(text, x=0.02, ha="left", fontsize=5.5, color="0.3", linespacing=1.25)
    return figure
