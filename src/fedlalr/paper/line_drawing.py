"""How curves are drawn: the look of a line, its spread over the seeds, and legends, labels and notes.

Colours are distinguishable with any colour vision, and line styles add to them. Lines are means over the seeds, bands
range from the lowest seed to the highest, a cross marks where a run failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.common.colours import shades
from fedlalr.paper.claims import casts
from fedlalr.paper.curve_measures import FINAL, Quantity
from fedlalr.paper.curves import Array, Curves, PanelCurves
from fedlalr.paper.plans import FigureLine
from fedlalr.paper.style import WIDTH, add_notes
from fedlalr.report.enlarging import Line, Region, draw_enlarged, ends, loss_ends, percent
from fedlalr.report.line_styles import LINE_STYLES, look_of
from fedlalr.report.tables import counted, name_of

Look = Mapping[str, Any]
METHOD_LOOKS: Mapping[str, Look] = {
    method: {**look_of(name_of(method)).matplotlib, "linewidth": 1.6 if i == 0 else 1.1, "zorder": 4 if i == 0 else 3}
    for i, method in enumerate(PAPER_METHODS)
}
BESIDE_STYLES = (LINE_STYLES[0], LINE_STYLES[7], LINE_STYLES[6])
"""Styles of the second and further lines of a method."""


def shades_of(method: str, count: int) -> list[Look]:
    """Looks of several lines of one method: shades of its colour, each with its own dashes."""
    colours = shades(METHOD_LOOKS[method]["color"], count) if count else []
    return [{"color": colour, "linestyle": LINE_STYLES[i], "linewidth": 1.2} for i, colour in enumerate(colours)]


def method_looks(result: PanelCurves) -> dict[str, Look]:
    """Looks of the methods as printed, and of those beside them: same colour, thin and solid if both are shown."""
    looks = {**METHOD_LOOKS}
    there = Counter(line.key for line in result.panel.lines if line.key in PAPER_METHODS)
    for line in _beside(result):
        method = line.config.algorithm.name
        if method in METHOD_LOOKS:
            before, own = there[method], METHOD_LOOKS[method]
            styles = [style for style in BESIDE_STYLES if style != own["linestyle"]]
            width = 0.9 if before <= len(styles) else 0.5
            apart = {"linestyle": styles[(before - 1) % len(styles)], "linewidth": width} if before else {}
            looks[line.key] = {**own, **apart}
            there[method] += 1
    return looks


def layers(results: Sequence[PanelCurves]) -> list[list[PanelCurves]]:
    """The lines that share axes: all lines of a panel or, if there are many beside the methods as printed, one of each
    method, in separate panels for the settings as printed and for the tuned ones."""
    methods = [[line.config.algorithm.name for line in _beside(result)] for result in results]
    if all(len(names) <= 2 for names in methods) or any(len(set(names)) < len(names) for names in methods):
        return [list(results)]
    return [
        [_only(result, set(cast.values()), f"{result.panel.title}\n{reading}") for result in results]
        for reading, cast in casts(results[0])
    ]


def settings_note(results: Sequence[PanelCurves]) -> list[str]:
    """A note on the tuned settings, if they have separate panels and no entry in the legend."""
    if len(layers(results)) == 1:
        return []
    labels = dict.fromkeys(line.label.replace(",", "", 1) for result in results for line in _beside(result))
    rest = "" if len(labels) >= len(PAPER_METHODS) else "; the others as printed"
    return [f"Tuned: {'; '.join(labels)}{rest}."]


def _beside(result: PanelCurves) -> list[FigureLine]:
    return [line for line in result.panel.lines if line.key not in PAPER_METHODS]


def _only(result: PanelCurves, keys: set[str], title: str) -> PanelCurves:
    """Some of the lines of a panel."""
    panel = replace(result.panel, title=title, lines=tuple(line for line in result.panel.lines if line.key in keys))
    return PanelCurves(panel, {key: curves for key, curves in result.lines.items() if key in keys})


def empty_figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def two_parts(figure: Figure, above: float, below: float) -> tuple[SubFigure, SubFigure]:
    grid = figure.add_gridspec(2, 1, height_ratios=(above, below))
    return figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])


def pairs(figure: Figure | SubFigure, count: int, **shared: Any) -> Any:
    """Axes for some panels, two in a row; one that is left over is hidden, and a single one has the whole width."""
    panels = figure.subplots(max(1, -(-count // 2)), 1 if count == 1 else 2, squeeze=False, **shared)
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    return panels


def draw_lines(axes: Axes, result: PanelCurves, looks: Mapping[str, Look], pick: Callable[[Curves], Array]) -> None:
    if not result.lines:
        say_not_run(axes)
        axes.set_xlim(right=result.panel.lines[0].config.rounds if result.panel.lines else 1)
    for curves, x, look in by_rounds(result, looks):
        draw_curve(axes, curves, pick(curves), look, x)
    axes.set_xlim(left=0)


def draw_accuracies(axes: Axes, result: PanelCurves, looks: Mapping[str, Look], title: str) -> None:
    axes.set_title(title)
    draw_lines(axes, result, looks, lambda curves: curves.accuracy)
    axes.yaxis.set_major_formatter(percent)


def draw_zoom(axes: Axes, lines: Sequence[tuple[Curves, NDArray[Any], Look]], place: Sequence[float]) -> None:
    """Enlarge the ends of the best of some curves, given with their x and look, in a part of the axes given by its
    left, bottom, width and height."""
    region = ends([Line(x, curves.accuracy.mean(axis=0), look) for curves, x, look in lines])
    if region is not None:
        draw_inset(axes, region, place).yaxis.set_major_formatter(percent)


def draw_loss_zoom(
    axes: Axes,
    lines: Sequence[tuple[Curves, NDArray[Any], Look]],
    pick: Callable[[Curves], Array],
    place: Sequence[float],
) -> None:
    """Enlarge the ends of the losses, without those that diverge."""
    region = loss_ends([Line(x, pick(curves).mean(axis=0), look) for curves, x, look in lines])
    if region is not None:
        draw_inset(axes, region, place)


def draw_inset(axes: Axes, region: Region, place: Sequence[float]) -> Axes:
    """Axes within the axes, with a part of them enlarged."""
    inset = axes.inset_axes((place[0], place[1], place[2], place[3]), zorder=6)
    draw_enlarged(inset, region, linewidth=0.9)
    inset.tick_params(labelsize=5, length=1.5, pad=1)
    inset.set_facecolor("white")
    return inset


def name_best(axes: Axes, result: PanelCurves, looks: Mapping[str, Look], quantity: Quantity = FINAL) -> None:
    """Write which curve ends best, over the last tenth of the rounds: highest accuracy below, lowest loss above.

    Methods have their own colour; lines that are all FedLALR, in shades of it, are named in black.
    """
    if len(result.lines) < 2:
        return
    lower = quantity is not FINAL
    last = {key: float(quantity.measure(curves).mean()) for key, curves in result.lines.items()}
    best = min(last, key=lambda key: last[key] if lower else -last[key])
    line = next(line for line in result.panel.lines if line.key == best)
    methods = {line.config.algorithm.name for line in result.panel.lines}
    name, colour = (
        (name_of(line.config.algorithm.name), looks[best]["color"]) if len(methods) > 1 else (line.label, "k")
    )
    end = quantity.text(last[best]) if not lower else f"{last[best]:.2f}"
    axes.text(
        0.99, 0.98 if lower else 0.015, f"best end: {name}, {end}", transform=axes.transAxes, ha="right",
        va="top" if lower else "bottom", fontsize=5.5, color=colour, zorder=7,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.5},
    )  # fmt: skip


def by_rounds(result: PanelCurves, looks: Mapping[str, Look]) -> list[tuple[Curves, NDArray[Any], Look]]:
    """The curves of a panel with their rounds, for `draw_zoom`."""
    return [
        (curves, np.arange(1, curves.rounds + 1), look)
        for key, look in looks.items()
        if (curves := result.lines.get(key)) is not None
    ]


def say_not_run(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", color="0.5")


def judged(results: Sequence[PanelCurves], measure: str) -> str:
    """The label of an axis, with the set that the runs are evaluated on if it is the same for all."""
    held_out = {line.config.data.validation > 0 for result in results for line in result.panel.lines}
    return measure if len(held_out) > 1 else f"{'held-out' if True in held_out else 'test'} {measure}"


def draw_curve(axes: Axes, curves: Curves, values: Array, look: Look, x: NDArray[Any]) -> None:
    """The mean over the rounds that all seeds reached, with the range over several, and crosses where one failed."""
    whole = ~np.isnan(values).any(axis=0)
    axes.plot(x[whole], values[:, whole].mean(axis=0), **look)
    if len(values) > 1:
        low, high = values[:, whole].min(axis=0), values[:, whole].max(axis=0)
        axes.fill_between(x[whole], low, high, color=look["color"], alpha=0.18, linewidth=0)
    for row, failure in zip(values, curves.failures, strict=False):
        reached = np.flatnonzero(~np.isnan(row))
        if failure is not None and len(reached):
            last = reached[-1]
            axes.plot(x[last], row[last], marker="x", markersize=5, color=look["color"], zorder=5)


def frame_losses(axes: Axes, losses: Sequence[Array]) -> None:
    """Limit the axis to four times the median, so that a diverging loss does not flatten the others."""
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses]) if losses else np.empty(0)
    if len(finite) and finite.max() > 4 * np.median(finite):
        axes.set_ylim(0, 4 * float(np.median(finite)))


def label_rim(panels: Any, x: str, y: str) -> None:
    """Label the outer axes of a grid of panels."""
    for column in panels.T:
        shown = [axes for axes in column if axes.get_visible()]
        if shown:
            shown[-1].set_xlabel(x)
    for axes in panels[:, 0]:
        axes.set_ylabel(y)


def legend(figure: Figure | SubFigure, looks: Mapping[str, Look], labels: Sequence[str], title: str = "") -> None:
    handles = [Line2D([], [], label=label, **look) for look, label in zip(looks.values(), labels, strict=True)]
    columns = 2 if len(labels) == 4 or max(map(len, labels), default=0) >= 16 else 3
    legend = figure.legend(
        handles=handles, loc="outside upper center", ncols=columns, frameon=False, title=title, handlelength=2.6
    )
    legend.get_title().set_fontsize(7)


def methods_legend(figure: Figure | SubFigure, results: Sequence[PanelCurves]) -> None:
    """A legend of the methods that were run, or of all if none was."""
    looks = {key: look for result in results for key, look in method_looks(result).items()}
    labels = {line.key: line.label for result in results for line in result.panel.lines}
    ran = [key for key in looks if any(key in result.lines for result in results)] or list(PAPER_METHODS)
    legend(figure, {key: looks[key] for key in ran}, [labels[key] for key in ran])


def with_notes(figure: Figure, results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Add the notes at the foot, with the meaning of the lines."""
    curves = [curves for result in results for curves in result.lines.values()]
    most = max((len(one.seeds) for one in curves), default=0)
    lines = "No run yet." if not curves else "One seed." if most == 1 else f"Mean and range of up to {most} seeds."
    broke = any(failure for one in curves for failure in one.failures)
    panels = [(result.panel.title, line.key in result.lines) for result in results for line in result.panel.lines]
    missing = Counter(title for title, ran in panels if not ran)
    told = " and ".join(f"{counted(count, 'curve')} of {title}" for title, count in missing.items())
    absent = f"Not run: {told}." if missing and curves else ""
    return add_notes(figure, filter(None, [*notes, lines, absent, "× marks where a run failed." if broke else ""]))
