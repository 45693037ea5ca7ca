"""The figures drawn from training runs, for one column of a paper.

Colours are told apart with any colour vision, and line styles tell apart what colours may not. Lines are means over the
seeds, bands go from the lowest seed to the highest, a cross is where a run broke off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from fedlalr.federation.trajectory import QUANTILES, V_HAT_SQUARED, Point, rate_name
from fedlalr.paper.curves import Array, Curves, PanelCurves
from fedlalr.paper.plans import INTERVALS, METHODS
from fedlalr.paper.style import WIDTH, add_notes
from fedlalr.report.figures import COLOURS, DASHES

Look = Mapping[str, Any]
METHOD_LOOKS: Mapping[str, Look] = {
    method: {
        "color": COLOURS[i],
        "linestyle": DASHES[i],
        "linewidth": 1.6 if i == 0 else 1.1,
        "zorder": 4 if i == 0 else 3,
    }
    for i, method in enumerate(METHODS)
}
INTERVAL_LOOKS: Mapping[str, Look] = {
    key: {"color": COLOURS[i], "linestyle": DASHES[i], "linewidth": 1.3} for i, key in enumerate(INTERVALS)
}


def method_looks(result: PanelCurves) -> dict[str, Look]:
    """Methods as printed, and those beside them: in the colour of their method, thin and dotted."""
    beside = [line for line in result.panel.lines if line.key not in METHOD_LOOKS]
    return {**METHOD_LOOKS} | {
        line.key: {
            **METHOD_LOOKS[line.config.algorithm.name],
            "linestyle": DASHES[6 + i % 2],
            "linewidth": 1.0,
        }
        for i, line in enumerate(beside)
        if line.config.algorithm.name in METHOD_LOOKS
    }


def accuracy_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Test accuracy against rounds, two panels in a row."""
    figure = _in_pairs(results, 0.75, "row", _accuracy_panel)
    _methods_legend(figure, results)
    return _with_notes(figure, results, notes)


def shakespeare_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Accuracy and loss against rounds, non-IID and IID."""
    figure = _figure(3.9)
    panels = figure.subplots(2, max(1, len(results)), squeeze=False, sharey="row", sharex="col")
    for column, result in enumerate(results):
        _accuracy_panel(panels[0, column], result)
        _draw_lines(panels[1, column], result, method_looks(result), lambda curves: curves.loss)
        _frame_losses(panels[1, column], [curves.loss for curves in result.lines.values()])
    _label(panels[:1], "", _judged(results, "accuracy"))
    _label(panels[1:], "round", _judged(results, "loss"))
    _methods_legend(figure, results)
    return _with_notes(figure, results, notes)


def scalability_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Six methods for each cohort, and FedLALR with all cohorts against passes over the data."""
    groups = list(dict.fromkeys(result.panel.group for result in results))
    figure = _figure(1.55 * len(groups) + 2.5)
    above, below = _two_parts(figure, 1.55 * len(groups) + 0.4, 1.6)
    panels = above.subplots(len(groups), 2, squeeze=False, sharey="row")
    finals = below.subplots(1, len(groups), squeeze=False)
    for row, group in enumerate(groups):
        mine = [result for result in results if result.panel.group == group]
        six = [result for result in mine if result.panel.compares]
        for axes, result in zip(panels[row], six, strict=True):
            _accuracy_panel(axes, result)
        _cohorts_panel(finals[0, row], group, sorted(mine, key=_cohort))
    _label(panels, "round", _judged(results, "accuracy"))
    _label(finals, "passes over the data", _judged(results, "accuracy"))
    _methods_legend(above, results)
    return _with_notes(figure, results, notes)


def interval_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Accuracy, test loss and training loss of FedLALR with three numbers of local steps."""
    figure = _figure(5.0)
    panels = figure.subplots(3, max(1, len(results)), squeeze=False, sharex="col")
    for column, result in enumerate(results):
        panels[0, column].set_title(result.panel.title)
        _draw_lines(panels[0, column], result, INTERVAL_LOOKS, lambda curves: curves.accuracy)
        panels[0, column].yaxis.set_major_formatter(_percent)
        _draw_lines(panels[1, column], result, INTERVAL_LOOKS, lambda curves: curves.loss)
        _draw_lines(panels[2, column], result, INTERVAL_LOOKS, lambda curves: curves.train_loss)
    for row, name in enumerate((_judged(results, "accuracy"), _judged(results, "loss"), "training loss")):
        _label(panels[row : row + 1], "round" if row == 2 else "", name)
    _legend(figure, INTERVAL_LOOKS, list(INTERVALS.values()), "local steps in round t")
    return _with_notes(figure, results, notes)


def choices_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Test accuracy against rounds with one thing done in two ways, two panels in a row."""
    figure = _in_pairs(results, 0.5, "all", _choice_panel)
    return _with_notes(figure, results, notes)


def variants_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Test accuracy of FedLALR's variants against rounds and against what the clients have sent."""
    figure = _figure(1.7 * len(results) + 0.9)
    panels = figure.subplots(max(1, len(results)), 2, squeeze=False, sharey=True)
    for row, result in zip(panels, results, strict=True):
        looks = _looks_in_order(result)
        most = max((float(np.nanmax(curves.uploaded)) for curves in result.lines.values()), default=0.0)
        name, unit = ("GB", 1e9) if most > 1e9 else ("MB", 1e6)
        _draw_lines(row[0], result, looks, lambda curves: curves.accuracy)
        if not result.lines:
            _say_not_run(row[1])
        for key, curves in result.lines.items():
            _draw_curve(row[1], curves, curves.accuracy, looks[key], curves.uploaded.mean(axis=0) / unit)
        row[0].yaxis.set_major_formatter(_percent)
        row[0].set_title(result.panel.title.partition(",")[0])
        row[0].set_xlabel("round")
        row[1].set_xlabel(f"{name} sent by the clients")
        row[1].set_xlim(left=0)
        row[0].set_ylabel(_judged([result], "accuracy"))
    lines = results[0].panel.lines if results else ()
    _legend(figure, _looks_in_order(results[0]), [line.label for line in lines], "momentum, second moment")
    return _with_notes(figure, results, notes)


def trajectory_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """‖v̂‖² and the effective rates of the followed clients over the local steps of a few rounds, for the first seed."""
    recorded = [(result, c) for result in results for c in result.lines.values() if any(c.trajectories)]
    points = recorded[0][1].trajectories[0] if recorded else ()
    rounds = sorted({point.round for point in points})
    clients = sorted({point.client for point in points})
    rows = max(1, -(-len(rounds) // 2))
    figure = _figure(2.5 * rows + 1.0)
    above, below = _two_parts(figure, 1.1, 1)
    for part, draw, name in (
        (above, _norms, "‖v̂‖²"),
        (below, _rates, "effective rate α/√v̂"),
    ):
        panels = part.subplots(rows, 2, squeeze=False, sharey=draw is _rates)
        for axes, t in zip(panels.flat, rounds, strict=False):
            axes.set_title(f"round {t}")
            for i, client in enumerate(clients):
                mine = [point for point in points if (point.round, point.client) == (t, client)]
                draw(axes, mine, {"color": COLOURS[i], "linestyle": DASHES[i], "linewidth": 1.2})
        for axes in panels.flat[len(rounds) :]:
            axes.set_visible(False)
        part.supylabel(name, fontsize=7.5)
        _label(panels, "local step", "")
    looks = {str(client): {"color": COLOURS[i], "linestyle": DASHES[i]} for i, client in enumerate(clients)}
    _legend(above, looks, [f"client {client}" for client in clients])
    band = (
        f"Rates: median over the coordinates, band from {QUANTILES[0] * 100:g} % to {QUANTILES[-1] * 100:g} % of them."
    )
    seed = f"Seed {recorded[0][1].seeds[0]}." if recorded else "No run yet."
    return add_notes(figure, [*notes, band, seed])


def _looks_in_order(result: PanelCurves) -> dict[str, Look]:
    """The first line as FedLALR is drawn, the others in the order in which they are told apart."""
    return {
        line.key: {"color": COLOURS[i], "linestyle": DASHES[i], "linewidth": 1.3 if i == 0 else 1.1}
        for i, line in enumerate(result.panel.lines)
    }


def _in_pairs(
    results: Sequence[PanelCurves],
    more: float,
    shared: Literal["row", "all"],
    draw: Callable[[Axes, PanelCurves], None],
) -> Figure:
    """Accuracy against rounds, two panels in a row, `more` inches above what these take."""
    rows = -(-len(results) // 2)
    figure = _figure(1.55 * rows + more)
    panels = figure.subplots(rows, 2, squeeze=False, sharey=shared)
    for axes, result in zip(panels.flat, results, strict=False):
        draw(axes, result)
    for axes in panels.flat[len(results) :]:
        axes.set_visible(False)
    _label(panels, "round", _judged(results, "accuracy"))
    return figure


def _choice_panel(axes: Axes, result: PanelCurves) -> None:
    """One thing done in two ways, which are named where the lines are not."""
    looks = _looks_in_order(result)
    axes.set_title(result.panel.short)
    _draw_lines(axes, result, looks, lambda curves: curves.accuracy)
    axes.yaxis.set_major_formatter(_percent)
    handles = [Line2D([], [], label=line.label, **looks[line.key]) for line in result.panel.lines]
    axes.legend(handles=handles, loc="best", frameon=False, fontsize=6.5, handlelength=1.8)


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _two_parts(figure: Figure, above: float, below: float) -> tuple[SubFigure, SubFigure]:
    grid = figure.add_gridspec(2, 1, height_ratios=(above, below))
    return figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])


def _accuracy_panel(axes: Axes, result: PanelCurves) -> None:
    axes.set_title(result.panel.title)
    _draw_lines(axes, result, method_looks(result), lambda curves: curves.accuracy)
    axes.yaxis.set_major_formatter(_percent)


def _cohorts_panel(axes: Axes, group: str, results: Sequence[PanelCurves]) -> None:
    """FedLALR with every cohort, on an axis on which they have seen equally much data."""
    axes.set_title(f"FedLALR on {group}")
    for i, result in enumerate(results):
        curves = result.lines.get("fedlalr")
        if curves is None:
            continue
        look = {"color": COLOURS[i], "linestyle": DASHES[i], "linewidth": 1.2}
        x = curves.passes * np.arange(1, curves.rounds + 1)
        _draw_curve(axes, curves, curves.accuracy, look, x)
        axes.plot([], [], label=result.panel.short, **look)
    axes.yaxis.set_major_formatter(_percent)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", frameon=False, fontsize=6.5, handlelength=1.8)


def _draw_lines(axes: Axes, result: PanelCurves, looks: Mapping[str, Look], pick: Callable[[Curves], Array]) -> None:
    if not result.lines:
        _say_not_run(axes)
        axes.set_xlim(right=result.panel.lines[0].config.rounds if result.panel.lines else 1)
    for key, look in looks.items():
        if key in result.lines:
            curves = result.lines[key]
            _draw_curve(axes, curves, pick(curves), look, np.arange(1, curves.rounds + 1))
    axes.set_xlim(left=0)


def _say_not_run(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", color="0.5")


def _judged(results: Sequence[PanelCurves], measure: str) -> str:
    """The name of an axis by what the runs are evaluated on; without it where that is not the same for all."""
    held_out = {line.config.data.validation > 0 for result in results for line in result.panel.lines}
    return measure if len(held_out) > 1 else f"{'held-out' if True in held_out else 'test'} {measure}"


def _draw_curve(axes: Axes, curves: Curves, values: Array, look: Look, x: NDArray[Any]) -> None:
    """The mean over the seeds as far as all of them got, with the range of several, and crosses where one broke off."""
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


def _norms(axes: Axes, points: Sequence[Point], look: Look) -> None:
    axes.plot([point.step for point in points], [point.values[V_HAT_SQUARED] for point in points], **look)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.yaxis.get_offset_text().set_fontsize(6)


def _rates(axes: Axes, points: Sequence[Point], look: Look) -> None:
    steps = [point.step for point in points]
    low, median, high = (
        [point.values[rate_name(quantile)] for point in points] for quantile in (QUANTILES[0], 0.5, QUANTILES[-1])
    )
    axes.plot(steps, median, **look)
    axes.fill_between(steps, low, high, color=look["color"], alpha=0.15, linewidth=0)
    for edge in (low, high):
        axes.plot(steps, edge, **{**look, "linewidth": 0.6})
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _frame_losses(axes: Axes, losses: Sequence[Array]) -> None:
    """Keep a method whose loss explodes from flattening the others: show up to four times the median of all."""
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses]) if losses else np.empty(0)
    if len(finite) and finite.max() > 4 * np.median(finite):
        axes.set_ylim(0, 4 * float(np.median(finite)))


def _label(panels: Any, x: str, y: str) -> None:
    """Name the axes at the rim of a grid of panels."""
    for column in panels.T:
        shown = [axes for axes in column if axes.get_visible()]
        if shown:
            shown[-1].set_xlabel(x)
    for axes in panels[:, 0]:
        axes.set_ylabel(y)


def _legend(figure: Figure | SubFigure, looks: Mapping[str, Look], labels: Sequence[str], title: str = "") -> None:
    handles = [Line2D([], [], label=label, **look) for look, label in zip(looks.values(), labels, strict=True)]
    columns = 2 if len(labels) == 4 or max(map(len, labels), default=0) >= 16 else 3
    legend = figure.legend(
        handles=handles, loc="outside upper center", ncols=columns, frameon=False, title=title, handlelength=2.6
    )
    legend.get_title().set_fontsize(7)


def _methods_legend(figure: Figure | SubFigure, results: Sequence[PanelCurves]) -> None:
    """The methods that were run, or all where none was."""
    looks = {key: look for result in results for key, look in method_looks(result).items()}
    labels = {line.key: line.label for result in results for line in result.panel.lines}
    ran = [key for key in looks if any(key in result.lines for result in results)] or list(METHODS)
    _legend(figure, {key: looks[key] for key in ran}, [labels[key] for key in ran])


def _with_notes(figure: Figure, results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """The notes at the foot, with what the lines are."""
    curves = [curves for result in results for curves in result.lines.values()]
    most = max((len(one.seeds) for one in curves), default=0)
    lines = "No run yet." if not curves else "One seed." if most == 1 else f"Mean and range of up to {most} seeds."
    broke = any(failure for one in curves for failure in one.failures)
    missing = sum(line.key not in result.lines for result in results for line in result.panel.lines)
    more = [
        *([f"{missing} {'curve was' if missing == 1 else 'curves were'} not run yet."] if missing and curves else []),
        *(["× marks where a run broke off."] if broke else []),
    ]
    return add_notes(figure, [*notes, lines, *more])


def _cohort(result: PanelCurves) -> int:
    return result.panel.lines[0].config.clients_per_round or 0


def _percent(value: float, _: object = None) -> str:
    return f"{value * 100:g} %"
