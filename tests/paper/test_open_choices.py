"""Choices that the paper leaves open and FedLALR's variants: shared runs, figures and numbers."""

from pathlib import Path

import numpy as np
import pytest

from fedlalr.config import load
from fedlalr.paper import plans
from fedlalr.paper.curve_measures import summary
from fedlalr.paper.curves import PanelCurves
from fedlalr.paper.open_choices import choices, variants
from fedlalr.paper.plans import Panel, Request
from fedlalr.paper.plots import choices_figure, variants_figure
from paper.synthetic_curves import ROUNDS, curves, rising
from paper.synthetic_curves import panel as panel_of

PAPER = Request("paper", frozenset({"digits", "cifar10"}))
RUNS = Path("runs")


def configs(plan):
    return {job.folder.parent.name: job.config for job in plan.jobs(RUNS, 1)}


def test_each_choice_changes_one_thing_of_the_papers_run():
    plan = choices(PAPER)
    assert [panel.short for panel in plan.panels] == [
        "BatchNorm statistics", "kind of normalisation", "gradient clipping", "3 + ⌊log₄ t⌋, counted in",
        "weights of unequal clients",
    ]  # fmt: skip
    base = load("cifar10").model_dump()
    for panel in plan.panels:
        first, second = (line.config.model_dump() for line in panel.lines)
        assert sum(first[key] != second[key] for key in first) == 1, panel.short
    changed = configs(plan)
    assert changed["fedlalr-recalibrated"].model_dump() == {**base, "buffers": "recalibrate"}
    assert changed["fedlalr-clipped"].model_dump() == {**base, "clip_norm": 10.0}
    assert changed["fedlalr-group-norm"].model.options["norm"] == "group"
    assert changed["log-3-4-epochs"].local.unit == "epochs"
    assert changed["fedlalr-by-samples"].weighting == "samples"
    assert changed["fedlalr-by-samples"].partition.scheme == "dirichlet-classes"


@pytest.mark.parametrize(("plan", "new"), [(choices, 5), (variants, 3)])
def test_runs_of_other_figures_are_used_again(plan, new):
    mine = {job.folder: job for job in plan(PAPER).jobs(RUNS, 1)}
    others = {
        job.folder: job for figure in ("cifar", "interval") for job in getattr(plans, figure)(PAPER).jobs(RUNS, 1)
    }
    shared = mine.keys() & others.keys()
    assert len(mine) - len(shared) == new
    assert all(mine[folder].config.problem() == others[folder].config.problem() for folder in shared)


def test_variants_are_the_four_of_momentum_and_second_moment():
    options = [job.config.algorithm.options for job in variants(PAPER).jobs(RUNS, 1)]
    assert [(one.get("momentum", "average"), one.get("second_moment", "mean")) for one in options] == [
        ("average", "mean"), ("restart", "mean"), ("average", "max"), ("restart", "max"),
    ]  # fmt: skip


def test_digits_stand_in_without_what_a_perceptron_lacks():
    plan = choices(Request("smoke", frozenset({"digits"})))
    assert [panel.short for panel in plan.panels] == [
        "gradient clipping", "3 + ⌊log₄ t⌋, counted in", "weights of unequal clients"
    ]  # fmt: skip
    assert any("stand in for CIFAR-10" in note for note in plan.notes)


def drawn(plan: Panel, *finals: float):
    lines = {line.key: curves(rising(final), label=line.label) for line, final in zip(plan.lines, finals, strict=False)}
    result = panel_of(lines)
    return type(result)(plan, lines)


def test_choices_are_drawn_in_panels_that_name_their_lines():
    results = [drawn(panel, 0.8, 0.7) for panel in choices(PAPER).panels]
    figure = choices_figure(results, ["A note."])
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title() for axes in shown] == [result.panel.short for result in results]
    assert [text.get_text() for text in shown[2].get_legend().get_texts()] == ["none, 79.6 %", "norm 10, 69.7 %"]
    assert len(shown[2].get_lines()) == 2
    assert [axes.get_xlabel() for axes in shown] == ["", "", "", "round", "round"]


def test_variants_are_drawn_against_rounds_and_against_gigabytes():
    (panel,) = variants(PAPER).panels
    figure = variants_figure([drawn(panel, 0.8, 0.7, 0.6)], [])
    rounds, sent = figure.axes
    assert sent.get_xlabel() == "GB sent by the clients"
    assert len(rounds.get_lines()) == len(sent.get_lines()) == 3
    assert sent.get_lines()[0].get_xdata() == pytest.approx(np.arange(1, ROUNDS + 1))
    assert "Not run: 1 curve of CIFAR-10" in " ".join(figure.get_supxlabel().split())


def test_variants_that_were_not_run_are_said_to_be_in_both_panels_and_named_in_two_columns():
    (panel,) = variants(PAPER).panels
    figure = variants_figure([PanelCurves(panel, {})], [])
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [["not run yet"]] * 2
    assert figure.legends[0]._ncols == 2


def test_the_legend_of_a_choice_lies_where_its_curves_are_not():
    panel = choices(PAPER).panels[2]
    results = [drawn(panel, 0.8, 0.7), PanelCurves(panel, {"fedlalr": curves(np.linspace(0.6, 0.0, ROUNDS))})]
    figure = choices_figure(results, [])
    figure.draw_without_rendering()
    for axes in figure.axes[:2]:
        box = axes.get_legend().get_window_extent()
        points = [axes.transData.transform(point) for line in axes.get_lines() for point in line.get_xydata()]
        assert points
        assert not any(box.contains(x, y) for x, y in points)


def test_the_axis_says_whether_runs_are_judged_on_held_out_training_images():
    small = Request("smoke", frozenset({"digits", "cifar10"}))
    names = [variants_figure([drawn(variants(one).panels[0], 0.8)], []).axes[0].get_ylabel() for one in (PAPER, small)]
    assert names == ["test accuracy", "held-out accuracy"]


def test_curves_are_told_in_numbers_with_the_spread_of_several_seeds():
    (panel,) = variants(PAPER).panels
    (alone,) = summary([drawn(panel, 0.8)])
    assert (alone.panel, alone.line, alone.seeds) == ("momentum, second moment", "average, mean", (0,))
    assert (alone.final_accuracy, alone.final_accuracy_std) == (pytest.approx(0.796, abs=5e-4), None)
    assert (alone.largest_fall, alone.megabytes_up) == (0, 40_000)
    several = curves(np.full(ROUNDS, 0.4), np.full(ROUNDS, 0.6), label="average, mean")
    (both,) = summary([PanelCurves(panel, {"fedlalr": several})])
    assert both.seeds == (0, 1)
    assert (both.final_accuracy, both.final_accuracy_std) == (pytest.approx(0.5), pytest.approx(0.02**0.5))


def test_a_run_that_broke_off_at_once_has_sent_nothing():
    (panel,) = variants(PAPER).panels
    (row,) = summary([PanelCurves(panel, {"fedlalr": curves([], failures=["round 1: not finite"])})])
    assert (row.final_accuracy, row.megabytes_up) == (0, 0)
