"""Figures of runs as PNG and SVG, readable in greyscale and with any colour vision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlalr.report.comparison import Curve
from fedlalr.report.line_styles import looks_of
from fedlalr.report.tables import name_of


def accuracy_figure(
    runs: Mapping[str, Sequence[Curve]], path: Path, title: str, target: float | None = None
) -> list[Path]:
    """Draw accuracy against rounds and megabytes sent, mean and range over the seeds, to `path`.png and `path`.svg."""
    from matplotlib.figure import Figure  # slow imports, needed only here
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    by_rounds, by_megabytes = figure.subplots(1, 2, sharey=True)
    looks = looks_of([name_of(method) for method in runs])
    for (method, curves), kind in zip(runs.items(), looks, strict=True):
        rounds, megabytes, accuracy = _stacked(curves)
        if not len(rounds):
            continue
        look = {**kind.matplotlib, "linewidth": 1.8}
        for axes, x in ((by_rounds, rounds), (by_megabytes, megabytes)):
            label = name_of(method) if axes is by_rounds else None
            axes.plot(x, accuracy.mean(axis=0), label=label, zorder=3, **look)
            if len(accuracy) > 1:
                low, high = accuracy.min(axis=0), accuracy.max(axis=0)
                axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)
    for axes, label in ((by_rounds, "round"), (by_megabytes, "megabytes sent, up and down")):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        if target is not None:
            axes.axhline(target, color="0.4", linewidth=0.8, linestyle=(0, (2, 4)))
    by_rounds.set_xlim(left=0)
    by_megabytes.set_xscale("log")  # bytes sent differ by factors between methods
    low, high = by_megabytes.get_xlim()
    by_megabytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    by_megabytes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    by_megabytes.xaxis.set_minor_formatter(NullFormatter())  # its tick labels would overlap
    by_rounds.set_ylabel("test accuracy")
    by_rounds.set_ylim(0, 1)
    by_rounds.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.suptitle(title, parse_math=False)  # a dollar sign in a name does not start a formula
    if by_rounds.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=min(6, len(runs)), frameon=False, handlelength=3.2)
    return save(figure, path)


def save(figure: Any, path: Path) -> list[Path]:
    """A figure as PNG and as SVG; the same figure gives the same bytes."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    written = []
    with rc_context({"svg.hashsalt": "fedlalr", "svg.fonttype": "none"}):
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            target = path.with_suffix(f".{kind}")
            figure.savefig(target, dpi=150, metadata=metadata)
            written.append(target)
    return written


def _stacked(curves: Sequence[Curve]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Rounds `[T]`, mean megabytes `[T]` and accuracies `[S, T]`, over the rounds in which every run has one."""
    length = min((len(curve.records) for curve in curves), default=0)
    if not length:
        return np.empty(0), np.empty(0), np.empty((0, 0))
    rounds = np.array([record.round for record in curves[0].records[:length]])
    megabytes = np.array([curve.megabytes()[:length] for curve in curves]).mean(axis=0)
    accuracies = np.array([curve.accuracies[:length] for curve in curves])
    measured = ~np.isnan(accuracies).any(axis=0)
    return rounds[measured], megabytes[measured], accuracies[:, measured]
