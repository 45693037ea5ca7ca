"""Figures of runs as PNG and SVG, readable in greyscale and with any colour vision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedlalr.config import ConfigError
from fedlalr.config.grid import without_accuracy
from fedlalr.report.comparison import Curve, complete_finals, default_target, measure_of
from fedlalr.report.enlarging import Line, Region, draw_enlarged, ends, mean_cost, percent, rise
from fedlalr.report.groups import group_runs
from fedlalr.report.line_styles import in_order, looks_of
from fedlalr.report.runs import find_runs, read_run
from fedlalr.report.statistics import spread
from fedlalr.report.tables import name_of

Runs = Mapping[str, Sequence[Curve]]
"""The runs of each line, one for each seed, by its label."""
Looks = Mapping[str, Mapping[str, Any]]


def accuracy_figure(runs: Runs, path: Path, title: str, target: float | None = None) -> list[Path]:
    """Draw accuracy against rounds and megabytes sent, mean and range over the seeds, to `path`.png and `path`.svg."""
    panels = (Panel("round", Curve.rounds), Panel("megabytes sent, up and down", Curve.megabytes))
    methods = list(runs)
    named = {name_of(methods[i]): runs[methods[i]] for i in in_order([name_of(method) for method in methods])}
    return save(draw(named, list(named), panels, title, target), path)


def bytes_figure(places: Sequence[str | Path], path: Path, title: str, target: float | None) -> list[Path]:
    """Draw the accuracy of stored runs, or without any their loss, against the megabytes sent up, down and both."""
    found = group_runs([read_run(place) for place in find_runs(places)])
    groups = [found[i] for i in in_order([group.method for group in found])]
    losses = without_accuracy(run.records for group in groups for run in group.runs)
    if losses and target is not None:
        raise ConfigError(f"the target {target:g} is an accuracy, but these runs have none, only losses; leave it out")
    panels = (
        Panel("megabytes up", partial(Curve.megabytes, down=False), losses),
        Panel("megabytes down", partial(Curve.megabytes, up=False), losses),
        Panel("megabytes up and down", Curve.megabytes, losses),
    )
    curves = {group.label: [Curve(run.records, run.failure) for run in group.runs] for group in groups}
    kinds = ("pdf",) if path.suffix.lower() == ".pdf" else ("png", "svg")
    return save(draw(curves, [group.method for group in groups], panels, title, target), path, kinds)


class Panel(NamedTuple):
    """The name of a horizontal axis, and the places of a run's rounds on it: rounds, or what they cost."""

    name: str
    across: Callable[[Curve], list[float]]
    losses: bool = False
    """Losses are drawn, not accuracies."""

    @property
    def by_rounds(self) -> bool:
        return self.name == "round"


def draw(runs: Runs, methods: Sequence[str], panels: Sequence[Panel], title: str, target: float | None = None) -> Any:
    """Accuracy or loss in one panel for each horizontal axis, which names the best line, above a part of it enlarged.

    `methods` chooses the colours of the labelled lines. The target defaults to one that all methods come near.
    """
    from matplotlib.figure import Figure  # a slow import, needed only here

    goal = default_target(runs) if target is None else target
    looks = dict(zip(runs, (look.matplotlib for look in looks_of(methods)), strict=True))
    found = [_best(runs, looks, panel, goal) for panel in panels]
    enlarged = any(best is not None and best.region is not None for best in found)
    wide = 9.2 if len(panels) < 3 else 11.0
    figure = Figure(figsize=(wide, 6.6 if enlarged else 4.2), layout="constrained")
    ratios = (3, 2) if enlarged else (1,)
    rows = figure.subplots(len(ratios), len(panels), squeeze=False, height_ratios=ratios)
    for axes, below, panel, best in zip(rows[0], rows[-1], panels, found, strict=True):
        _draw_whole(axes, runs, looks, panel, target)
        if axes is not rows[0, 0]:
            axes.sharey(rows[0, 0])
            axes.tick_params(labelleft=False)
        if best is not None:
            axes.set_title(best.words, fontsize="medium", color=best.colour, parse_math=False)
        if enlarged:
            _draw_part(axes, below, panel, best and best.region)
    losses = panels[0].losses
    rows[0, 0].set_ylabel(measure_of(runs, losses))
    if not losses:
        rows[0, 0].set_ylim(0, min(1, 1.1 * rows[0, 0].get_ylim()[1]))
    if enlarged:
        rows[1, 0].set_ylabel(f"{measure_of(runs, losses)}, enlarged")
    figure.suptitle(title, parse_math=False)  # a dollar sign in a name does not start a formula
    handles, labels = rows[0, 0].get_legend_handles_labels()
    if labels:
        columns = min(6, max(1, int(wide / (0.8 + 0.07 * max(map(len, labels))))))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.2)
    return figure


class _Best(NamedTuple):
    """The best line of a panel, in words and in its colour, and what is enlarged to see it."""

    words: str
    colour: str
    region: Region | None


def _best(runs: Runs, looks: Looks, panel: Panel, target: float) -> _Best | None:
    """The line that ends highest or, against a cost, that needs least to the target; None without another line
    and for losses, which have no target."""
    lines = {label: line for label, curves in runs.items() if (line := _line(curves, looks[label], panel)) is not None}
    if len(lines) < 2 or panel.losses:
        return None
    if panel.by_rounds:
        means = {label: spread(finals).mean for label in lines if (finals := complete_finals(runs[label]))}
        most = max(means.values(), default=np.nan)
        winners = [label for label, mean in means.items() if mean == most]
        region = ends(list(lines.values()))
        words = f"best in the last round:\n{' and '.join(winners)}, {percent(round(most, 3))}"
    else:
        costs = {label: mean_cost([_cost(curve, panel, target) for curve in runs[label]]) for label in lines}
        least = min(costs.values())
        winners = [label for label, cost in costs.items() if cost == least and np.isfinite(least)]
        region = rise(list(lines.values()), list(costs.values()), target)
        words = f"fewest megabytes to {percent(target)}:\n{' and '.join(winners)}, {_short(least)} MB"
    if not winners:
        return None
    return _Best(words, looks[winners[0]]["color"] if len(winners) == 1 else "black", region)


def _line(curves: Sequence[Curve], look: Mapping[str, Any], panel: Panel) -> Line | None:
    """The mean over the seeds; None without any value."""
    measured, values = _measured(curves, panel.losses)
    if not len(measured):
        return None
    places = np.mean([[panel.across(curve)[i] for i in measured] for curve in curves], axis=0)
    return Line(places, values.mean(axis=0), look)


def _cost(curve: Curve, panel: Panel, target: float) -> float | None:
    first = curve.first_at(target)
    return None if first is None else panel.across(curve)[first]


def _short(megabytes: float) -> str:
    """
    >>> _short(0.0944), _short(1), _short(12.6), _short(1234.5)
    ('0.094', '1.0', '13', '1,234')
    """
    return f"{megabytes:#.2g}" if megabytes < 9.95 else f"{megabytes:,.0f}"


def _draw_whole(axes: Any, runs: Runs, looks: Looks, panel: Panel, target: float | None) -> None:
    """Draw all lines with their range over the seeds, and the target, if one is given."""
    for label, curves in runs.items():
        line = _line(curves, looks[label], panel)
        if line is None:
            continue
        axes.plot(line.x, line.y, label=label, zorder=3, linewidth=1.8, **line.look)
        values = _measured(curves, panel.losses)[1]
        if len(values) > 1:
            low, high = values.min(axis=0), values.max(axis=0)
            axes.fill_between(line.x, low, high, color=line.look["color"], alpha=0.15, linewidth=0)
    if target is not None:
        axes.axhline(target, color="0.4", linewidth=0.8, linestyle=(0, (2, 4)))
    if panel.by_rounds:
        axes.set_xlim(left=0)
    _finish(axes, panel)


def _draw_part(axes: Any, below: Any, panel: Panel, region: Region | None) -> None:
    """Draw a region of the axes enlarged in the axes below, and frame it above."""
    from matplotlib.patches import Rectangle

    if region is None:
        below.set_visible(False)
        return
    draw_enlarged(below, region, linewidth=1.5)
    _finish(below, panel)
    (left, right), (low, high) = below.get_xlim(), below.get_ylim()
    frame = Rectangle((left, low), right - left, high - low, fill=False, edgecolor="0.35", linewidth=0.8, zorder=5)
    axes.add_patch(frame)


def _finish(axes: Any, panel: Panel) -> None:
    axes.set_xlabel(panel.name)
    axes.grid(alpha=0.3)
    if not panel.losses:
        axes.yaxis.set_major_formatter(percent)
    if not panel.by_rounds:
        _logarithmic(axes)


def _measured(curves: Sequence[Curve], losses: bool = False) -> tuple[NDArray[Any], NDArray[Any]]:
    """The rounds, counted from 0, in which every run has an accuracy or finite loss, and those values `[S, T]`."""
    length = min((len(curve.records) for curve in curves), default=0)
    found = [(curve.losses if losses else curve.accuracies)[:length] for curve in curves]
    values = np.array(found).reshape(len(curves), length)
    measured = np.flatnonzero(np.isfinite(values).all(axis=0))
    return measured, values[:, measured]


def _logarithmic(axes: Any) -> None:
    """Make the horizontal axis logarithmic: the bytes sent differ by factors between methods."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(
        LogLocator(subs=(1, 2, 5) if high < 100 * low else (1, 3) if high < 1000 * low else (1,))
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())  # its tick labels would overlap


def save(figure: Any, path: Path, kinds: Sequence[str] = ("png", "svg"), dpi: int = 150) -> list[Path]:
    """Save a figure in several formats; the same figure gives the same bytes."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {"png": "Software", "svg": "Date", "pdf": "CreationDate"}
    paths = [path.with_suffix(f".{kind}") for kind in kinds]
    with rc_context({"svg.hashsalt": "fedlalr", "svg.fonttype": "none"}):
        for target, kind in zip(paths, kinds, strict=True):
            figure.savefig(target, dpi=dpi, metadata={dated[kind]: None})
    return paths
