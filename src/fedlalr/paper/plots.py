"""The figures drawn from training runs, sized for one column of a paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter
from numpy.typing import NDArray

from fedlalr.federation.trajectory import QUANTILES, V_HAT_SQUARED, TrajectoryPoint, rate_name
from fedlalr.paper.curve_measures import FINAL, FINAL_LOSS, FINAL_TRAINING_LOSS, rounds_to
from fedlalr.paper.curves import Curves, PanelCurves
from fedlalr.paper.line_drawing import (
    Look,
    by_rounds,
    draw_accuracies,
    draw_curve,
    draw_inset,
    draw_lines,
    draw_loss_zoom,
    draw_zoom,
    empty_figure,
    frame_losses,
    judged,
    label_rim,
    layers,
    legend,
    method_looks,
    methods_legend,
    name_best,
    pairs,
    say_not_run,
    settings_note,
    shades_of,
    two_parts,
    with_notes,
)
from fedlalr.paper.plans import INTERVALS
from fedlalr.paper.style import add_notes
from fedlalr.report.enlarging import Line, mean_cost, percent, rise


def accuracy_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Test accuracy against rounds, two panels in a row; tuned settings have one once all their curves are there."""
    printed, *others = layers(_comparing(results))
    shown = [
        part
        for first, *tuned in zip(printed, *others, strict=True)
        for part in (first, *(one for one in tuned if len(one.lines) == len(one.panel.lines)))
    ]
    figure = _in_pairs(shown, 2.2, 0.75, "row", _accuracy_panel)
    methods_legend(figure, printed)
    return with_notes(figure, results, [*notes, *settings_note(results)])


def shakespeare_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Accuracy above loss against rounds, non-IID and IID."""
    parts = layers(results)
    figure = empty_figure(0.9 + 2 * len(parts) * 1.5)
    panels = figure.subplots(2 * len(parts), max(1, len(results)), squeeze=False, sharey="row", sharex="col")
    above, below = panels[: len(parts)], panels[len(parts) :]
    for accuracies, losses, part in zip(above, below, parts, strict=True):
        for accuracy, loss, result in zip(accuracies, losses, part, strict=False):
            _accuracy_panel(accuracy, result)
            _loss_panel(loss, result, method_looks(result))
            frame_losses(loss, [curves.loss for curves in result.lines.values()])
    if len(parts) > 1:
        for axes, result in zip(below.flat, [result for part in parts for result in part], strict=False):
            axes.set_title(result.panel.title)
    label_rim(above, "", judged(results, "accuracy"))
    label_rim(below, "round", judged(results, "loss"))
    methods_legend(figure, parts[0])
    return with_notes(figure, results, [*notes, *settings_note(results)])


def scalability_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Six methods for each cohort, and FedLALR with all cohorts against passes over the data."""
    groups = list(dict.fromkeys(result.panel.group for result in results))
    figure = empty_figure(1.55 * len(groups) + 2.5)
    above, below = two_parts(figure, 1.55 * len(groups) + 0.4, 1.6)
    panels = above.subplots(len(groups), 2, squeeze=False, sharey="row")
    finals = below.subplots(1, len(groups), squeeze=False)
    for row, group in enumerate(groups):
        mine = [result for result in results if result.panel.group == group]
        six = [result for result in mine if result.panel.compares]
        for axes, result in zip(panels[row], six, strict=True):
            _accuracy_panel(axes, result, (0.58, 0.36, 0.42, 0.28))
        panels[row, 0].set_ylim(bottom=-0.1)  # the words below clear of a method that learns nothing
        _cohorts_panel(finals[0, row], group, sorted(mine, key=lambda result: result.panel.cohort))
    label_rim(panels, "round", judged(results, "accuracy"))
    label_rim(finals, "passes over the data", judged(results, "accuracy"))
    methods_legend(above, results)
    return with_notes(figure, results, notes)


def interval_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Accuracy, test loss and training loss of FedLALR with three numbers of local steps."""
    figure = empty_figure(5.0)
    panels = figure.subplots(3, max(1, len(results)), squeeze=False, sharex="col", sharey="row")
    for column, result in enumerate(results):
        looks = _looks_in_order(result)
        draw_accuracies(panels[0, column], result, looks, result.panel.title)
        draw_zoom(panels[0, column], by_rounds(result, looks), (0.45, 0.24, 0.55, 0.42))
        name_best(panels[0, column], result, looks)
        _loss_panel(panels[1, column], result, looks)
        _training_loss_panel(panels[2, column], result, looks)
    for row, name in enumerate((judged(results, "accuracy"), judged(results, "loss"), "training loss")):
        label_rim(panels[row : row + 1], "round" if row == 2 else "", name)
    looks = dict(zip(INTERVALS, shades_of("fedlalr", len(INTERVALS)), strict=True))
    legend(figure, looks, list(INTERVALS), "FedLALR's interval K_t in round t")
    return with_notes(figure, results, notes)


def choices_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Test accuracy against rounds for each choice, two panels in a row."""
    figure = _in_pairs(results, 1.55, 0.5, "all", _choice_panel)
    return with_notes(figure, results, notes)


def variants_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """Test accuracy of FedLALR's variants against rounds and against bytes sent."""
    figure = empty_figure(1.7 * len(results) + 0.9)
    panels = figure.subplots(max(1, len(results)), 2, squeeze=False, sharey=True)
    for row, result in zip(panels, results, strict=True):
        looks = _looks_in_order(result)
        most = max((float(np.nanmax(curves.uploaded)) for curves in result.lines.values()), default=0.0)
        name, unit = ("GB", 1e9) if most > 1e9 else ("MB", 1e6)
        draw_accuracies(row[0], result, looks, f"{result.panel.title.partition(',')[0]}, by rounds")
        draw_zoom(row[0], by_rounds(result, looks), (0.45, 0.2, 0.53, 0.45))
        name_best(row[0], result, looks)
        if not result.lines:
            say_not_run(row[1])
        drawn = [(curves, curves.uploaded.mean(axis=0) / unit, looks[key]) for key, curves in result.lines.items()]
        for curves, sent, look in drawn:
            draw_curve(row[1], curves, curves.accuracy, look, sent)
        _rise(row[1], drawn)
        row[1].set_title("by traffic")
        row[0].set_xlabel("round")
        row[1].set_xlabel(f"{name} sent by the clients")
        row[1].set_xlim(left=0)
        row[0].set_ylabel(judged([result], "accuracy"))
    lines = results[0].panel.lines if results else ()
    legend(figure, _looks_in_order(results[0]), [line.label for line in lines], "FedLALR: momentum, second moment")
    return with_notes(figure, results, notes)


def trajectory_figure(results: Sequence[PanelCurves], notes: Sequence[str]) -> Figure:
    """‖v̂‖² and the effective rates of the followed clients over the local steps of a few rounds, for the first seed."""
    recorded = [(result, c) for result in results for c in result.lines.values() if any(c.trajectories)]
    points = recorded[0][1].trajectories[0] if recorded else ()
    rounds = sorted({point.round for point in points})
    clients = sorted({point.client for point in points})
    looks = shades_of("fedlalr", len(clients))
    figure = empty_figure(2.5 * max(1, -(-len(rounds) // 2)) + 1.0)
    above, below = two_parts(figure, 1.1, 1)
    for part, draw, name in ((above, _norms, "‖v̂‖²"), (below, _rates, "effective rate α/√v̂")):
        panels = pairs(part, len(rounds), sharey=draw is _rates)
        for axes, t in zip(panels.flat, rounds, strict=False):
            axes.set_title(f"round {t}")
            for client, look in zip(clients, looks, strict=True):
                mine = [point for point in points if (point.round, point.client) == (t, client)]
                draw(axes, mine, look)
        part.supylabel(name, fontsize=7.5)
        label_rim(panels, "local step", "")
    legend(above, {str(i): look for i, look in enumerate(looks)}, [f"client {client}" for client in clients])
    band = (
        f"Rates: median over the coordinates, band from {QUANTILES[0] * 100:g} % to {QUANTILES[-1] * 100:g} % of them."
    )
    seed = f"Seed {recorded[0][1].seeds[0]}." if recorded else "No run yet."
    return add_notes(figure, [*notes, band, seed])


def _looks_in_order(result: PanelCurves) -> dict[str, Look]:
    """Shades of FedLALR's colour, for lines that are all FedLALR."""
    lines = result.panel.lines
    return {line.key: look for line, look in zip(lines, shades_of("fedlalr", len(lines)), strict=True)}


def _comparing(results: Sequence[PanelCurves]) -> Sequence[PanelCurves]:
    """Without panels that have a single curve while others have several: these would compare nothing."""
    return [one for one in results if len(one.lines) != 1] if any(len(one.lines) > 1 for one in results) else results


def _in_pairs(
    results: Sequence[PanelCurves],
    height: float,
    more: float,
    shared: Literal["row", "all"],
    draw: Callable[[Axes, PanelCurves], None],
) -> Figure:
    """Accuracy against rounds, two panels in a row, `height` inches each, and `more` inches around them."""
    figure = empty_figure(height * -(-len(results) // 2) + more)
    panels = pairs(figure, len(results), sharey=shared)
    for axes, result in zip(panels.flat, results, strict=False):
        draw(axes, result)
    label_rim(panels, "round", judged(results, "accuracy"))
    return figure


def _choice_panel(axes: Axes, result: PanelCurves) -> None:
    """The values of one choice, with a legend clear of the lines."""
    looks = _looks_in_order(result)
    draw_accuracies(axes, result, looks, result.panel.short)
    ends = {key: f", {FINAL.text(float(FINAL.measure(curves).mean()))}" for key, curves in result.lines.items()}
    handles = [
        Line2D([], [], label=f"{line.label}{ends.get(line.key, '')}", **looks[line.key]) for line in result.panel.lines
    ]
    axes.legend(handles=handles, loc="best", frameon=False, fontsize=6, handlelength=1.8)
    draw_zoom(axes, by_rounds(result, looks), (0.42, 0.44, 0.56, 0.3))


def _accuracy_panel(
    axes: Axes, result: PanelCurves, zoomed: tuple[float, float, float, float] = (0.5, 0.24, 0.5, 0.34)
) -> None:
    looks = method_looks(result)
    draw_accuracies(axes, result, looks, result.panel.title)
    draw_zoom(axes, by_rounds(result, looks), zoomed)
    name_best(axes, result, looks)


def _loss_panel(axes: Axes, result: PanelCurves, looks: Mapping[str, Look]) -> None:
    """The test loss against rounds, its end enlarged."""
    draw_lines(axes, result, looks, lambda curves: curves.loss)
    draw_loss_zoom(axes, by_rounds(result, looks), lambda curves: curves.loss, (0.45, 0.42, 0.55, 0.42))
    name_best(axes, result, looks, FINAL_LOSS)


def _training_loss_panel(axes: Axes, result: PanelCurves, looks: Mapping[str, Look]) -> None:
    """The same for the training loss, which leaves less room."""
    draw_lines(axes, result, looks, lambda curves: curves.train_loss)
    draw_loss_zoom(axes, by_rounds(result, looks), lambda curves: curves.train_loss, (0.45, 0.52, 0.55, 0.34))
    name_best(axes, result, looks, FINAL_TRAINING_LOSS)


def _rise(axes: Axes, lines: Sequence[tuple[Curves, NDArray[Any], Look]]) -> None:
    """Enlarge the rise, where curves against bytes differ, and name the one that needs the fewest bytes to an accuracy
    that all of them reach."""
    if len(lines) < 2:
        return
    best = min(float(np.nanmax(curves.accuracy.mean(axis=0))) for curves, _, _ in lines)
    target = float(np.floor(18 * best) / 20)  # nine tenths of it, in steps of 5 %
    costs = [_cost(curves, sent, target) for curves, sent, _ in lines]
    region = rise([Line(sent, curves.accuracy.mean(axis=0), look) for curves, sent, look in lines], costs, target)
    if region is None:
        return
    draw_inset(axes, region, (0.42, 0.2, 0.56, 0.45)).yaxis.set_major_formatter(percent)
    cheapest = lines[int(np.argmin(costs))][0].label
    told = f"fewest bytes to {percent(target)}: {cheapest}"
    axes.text(0.99, 0.015, told, transform=axes.transAxes, ha="right", va="bottom", fontsize=5, zorder=7)


def _cost(curves: Curves, sent: NDArray[Any], target: float) -> float:
    """What was sent when an accuracy was reached, over the seeds; infinite if one of them does not reach it."""
    firsts = rounds_to(target).measure(curves)
    return mean_cost([float(sent[int(first) - 1]) if np.isfinite(first) else None for first in firsts])


def _cohorts_panel(axes: Axes, group: str, results: Sequence[PanelCurves]) -> None:
    """FedLALR with every cohort, against passes over the data."""
    axes.set_title(f"FedLALR on {group}")
    lines = []
    for result, look in zip(results, shades_of("fedlalr", len(results)), strict=True):
        curves = result.lines.get("fedlalr")
        if curves is not None:
            lines.append((curves, curves.passes * np.arange(1, curves.rounds + 1), look))
            draw_curve(axes, curves, curves.accuracy, look, lines[-1][1])
            end = FINAL.text(float(FINAL.measure(curves).mean()))
            axes.plot([], [], label=f"{result.panel.short}, {end}", **look)
    draw_zoom(axes, lines, (0.22, 0.12, 0.36, 0.5))
    axes.yaxis.set_major_formatter(percent)
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", frameon=False, fontsize=6.5, handlelength=1.8)


def _norms(axes: Axes, points: Sequence[TrajectoryPoint], look: Look) -> None:
    axes.plot([point.step for point in points], [point.values[V_HAT_SQUARED] for point in points], **look)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes.yaxis.get_offset_text().set_fontsize(6)


def _rates(axes: Axes, points: Sequence[TrajectoryPoint], look: Look) -> None:
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
