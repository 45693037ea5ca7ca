"""Figures of runs as PNG and SVG, readable in greyscale and with any colour vision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlalr.report.comparison import Curve
from fedlalr.report.groups import group_runs, method_of
from fedlalr.report.line_styles import looks_of
from fedlalr.report.runs import find_runs, read_run
from fedlalr.report.tables import name_of


def accuracy_figure(
    runs: Mapping[str, Sequence[Curve]], path: Path, title: str, target: float | None = None
) -> list[Path]:
    """Draw accuracy against rounds and megabytes sent, mean and range over the seeds, to `path`.png and `path`.svg."""
    panels = {"round": Curve.rounds, "megabytes sent, up and down": Curve.megabytes}
    named = {name_of(method): curves for method, curves in runs.items()}
    return save(_figure(named, list(named), panels, title, target), path)


def bytes_figure(places: Sequence[str | Path], path: Path, title: str) -> list[Path]:
    """Draw the accuracy of stored runs against the megabytes sent up, down and in both directions."""
    groups = group_runs([read_run(place) for place in find_runs(places)])
    panels: dict[str, Callable[[Curve], list[float]]] = {
        "megabytes up": partial(Curve.megabytes, down=False),
        "megabytes down": partial(Curve.megabytes, up=False),
        "megabytes up and down": Curve.megabytes,
    }
    curves = {group.label: [Curve(run.records, run.failure) for run in group.runs] for group in groups}
    methods = [method_of(group.runs[0]).partition(" (")[0] for group in groups]  # one colour with and without a codec
    return save(_figure(curves, methods, panels, title), path)


def _figure(
    runs: Mapping[str, Sequence[Curve]],
    methods: Sequence[str],
    panels: Mapping[str, Callable[[Curve], list[float]]],
    title: str,
    target: float | None = None,
) -> Any:
    """Accuracy in one panel for each horizontal axis; `methods` chooses the colours of the labelled lines."""
    from matplotlib.figure import Figure  # a slow import, needed only here

    figure = Figure(figsize=(5 * len(panels), 4.2), layout="constrained")
    row = list(figure.subplots(1, len(panels), sharey=True))
    for (label, curves), kind in zip(runs.items(), looks_of(methods), strict=True):
        measured, accuracy = _measured(curves)
        if not len(measured):
            continue
        for axes, across in zip(row, panels.values(), strict=True):
            x = np.mean([[across(curve)[i] for i in measured] for curve in curves], axis=0)
            shown = label if axes is row[0] else None
            axes.plot(x, accuracy.mean(axis=0), label=shown, zorder=3, linewidth=1.8, **kind.matplotlib)
            if len(accuracy) > 1:
                low, high = accuracy.min(axis=0), accuracy.max(axis=0)
                axes.fill_between(x, low, high, color=kind.matplotlib["color"], alpha=0.15, linewidth=0)
    for axes, name in zip(row, panels, strict=True):
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
        if target is not None:
            axes.axhline(target, color="0.4", linewidth=0.8, linestyle=(0, (2, 4)))
        if name == "round":
            axes.set_xlim(left=0)
        else:
            _logarithmic(axes)
    row[0].set_ylabel("test accuracy")
    row[0].set_ylim(0, min(1, 1.1 * row[0].get_ylim()[1]))
    row[0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.suptitle(title, parse_math=False)  # a dollar sign in a name does not start a formula
    if row[0].get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=min(6, len(runs)), frameon=False, handlelength=3.2)
    return figure


def _measured(curves: Sequence[Curve]) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rounds, counted from 0, in which every run has an accuracy, and those accuracies `[S, T]`."""
    length = min((len(curve.records) for curve in curves), default=0)
    accuracies = np.array([curve.accuracies[:length] for curve in curves]).reshape(len(curves), length)
    measured = np.flatnonzero(~np.isnan(accuracies).any(axis=0))
    return measured, accuracies[:, measured]


def _logarithmic(axes: Any) -> None:
    """Bytes sent differ by factors between methods."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())  # its tick labels would overlap


def save(figure: Any, path: Path, kinds: Sequence[str] = ("png", "svg"), dpi: int = 150) -> list[Path]:
    """A figure in several formats; the same figure gives the same bytes."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}
    paths = [path.with_suffix(f".{kind}") for kind in kinds]
    with rc_context({"svg.hashsalt": "fedlalr", "svg.fonttype": "none"}):
        for target, kind in zip(paths, kinds, strict=True):
            figure.savefig(target, dpi=dpi, metadata={dated[kind]: None})
    return paths
