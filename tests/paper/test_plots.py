"""Figures from curves of known shape: what is drawn, and the notes for the reader."""

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.colors import to_hex

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.federation.trajectory import QUANTILES, V_HAT_SQUARED, TrajectoryPoint, rate_name
from fedlalr.paper.curves import PanelCurves
from fedlalr.paper.line_drawing import METHOD_LOOKS, method_looks
from fedlalr.paper.plans import INTERVALS, Beside, FigureLine, Panel
from fedlalr.paper.plots import (
    accuracy_figure,
    interval_figure,
    scalability_figure,
    shakespeare_figure,
    trajectory_figure,
    variants_figure,
)
from fedlalr.paper.style import WIDTH, save
from paper.synthetic_curves import CONFIG, ROUNDS, curves, interval_panel, panel, rising, six


def lines_of(axes):
    return {to_hex(line.get_color()).upper(): line for line in axes.get_lines() if len(line.get_xdata()) > 1}


def foot(figure):
    return " ".join(figure.get_supxlabel().split())


def points():
    rates = {rate_name(quantile): 1 + quantile for quantile in QUANTILES}
    return [
        TrajectoryPoint(t, client, k, {V_HAT_SQUARED: k * (1 + client), **rates})
        for t in (1, 8, 16, 23)
        for client in (0, 1)
        for k in (1, 2, 3)
    ]


def test_every_method_is_a_line_of_its_own_colour_and_style():
    figure = accuracy_figure([panel(six())], [])
    drawn = lines_of(figure.axes[0])
    assert len(drawn) == len(PAPER_METHODS)
    assert len({(look["color"], str(look["linestyle"])) for look in METHOD_LOOKS.values()}) == len(PAPER_METHODS)
    mine = drawn[METHOD_LOOKS["fedlalr"]["color"].upper()]
    assert mine.get_ydata() == pytest.approx(rising(0.60))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "FedLALR", "FedAvg", "FedAdam", "FedAMSv1", "FedAMSv2", "LAFedOpt",
    ]  # fmt: skip


def test_several_seeds_are_their_mean_with_a_band_from_the_lowest_to_the_highest():
    both = curves(np.full(ROUNDS, 0.4), np.full(ROUNDS, 0.6))
    figure = accuracy_figure([panel({"fedlalr": both, "fedavg": both})], [])
    axes = figure.axes[0]
    assert lines_of(axes)[METHOD_LOOKS["fedlalr"]["color"].upper()].get_ydata() == pytest.approx(0.5)
    extent = axes.collections[0].get_datalim(axes.transData)
    assert (extent.y0, extent.y1) == (pytest.approx(0.4), pytest.approx(0.6))
    assert "Mean and range of up to 2 seeds." in foot(figure)


def test_one_seed_has_no_band_and_is_said_to_be_one():
    figure = accuracy_figure([panel(six())], [])
    assert not figure.axes[0].collections
    assert "One seed." in foot(figure)


def test_a_run_that_broke_off_is_marked_where_it_ended():
    broken = curves(rising(0.5)[:12], failures=["round 13: not finite"])
    figure = accuracy_figure([panel(six(fedadam=broken))], [])
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == [12]
    assert "× marks where a run failed" in foot(figure)


def test_notes_stand_at_the_foot_of_the_figure():
    note = "Digits stand in for CIFAR-100, which is not on this machine."
    assert note in foot(accuracy_figure([panel(six())], [note]))


def told(axes):
    return [text.get_text() for text in axes.texts]


def test_every_panel_names_the_method_that_ends_best_in_its_colour():
    ends = {"fedlalr": 0.6, "fedavg": 0.5, "fedadam": 0.55, "fedamsv1": 0.5, "fedamsv2": 0.65, "lafedopt": 0.5}
    axes = accuracy_figure([panel({key: curves(np.full(ROUNDS, end)) for key, end in ends.items()})], []).axes[0]
    assert told(axes) == ["best end: FedAMSv2, 65.0 %"]
    assert axes.texts[0].get_color() == METHOD_LOOKS["fedamsv2"]["color"]


def test_the_best_loss_is_the_lowest_and_a_diverging_one_is_not_enlarged():
    flat = {key: curves(rising(0.5), loss=[np.full(ROUNDS, loss)]) for key, loss in (("fedlalr", 2.0), ("fedavg", 1.8))}
    diverging = curves(rising(0.5), loss=[np.full(ROUNDS, 90.0)])
    figure = shakespeare_figure([panel({**flat, "fedadam": diverging})], [])
    loss = figure.axes[1]
    assert told(loss) == ["best end: FedAvg, 1.80"]
    assert [len(line.get_ydata()) < ROUNDS for line in loss.child_axes[0].get_lines()] == [True, True]


def test_variants_are_compared_by_bytes_where_they_rise():
    lines = [FigureLine(name, name, CONFIG) for name in ("slow", "fast")]
    shown = {"slow": curves(rising(0.8, half=9), label="slow"), "fast": curves(rising(0.8, half=4), label="fast")}
    figure = variants_figure(
        [PanelCurves(Panel("key", "Digits, variants", tuple(lines), "Digits", "variants"), shown)], []
    )
    assert told(figure.axes[1]) == ["fewest bytes to 65 %: fast"]
    assert figure.axes[1].child_axes


def test_a_panel_without_runs_says_so():
    figure = accuracy_figure([panel(six()), panel({})], [])
    assert [text.get_text() for text in figure.axes[1].texts] == ["not run yet"]


def test_a_panel_with_a_single_curve_is_left_out_beside_one_that_compares():
    alone = panel({"fedavg": six()["fedavg"]}, "alone")
    figure = accuracy_figure([panel(six(), "six"), alone], [])
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == ["six"]
    assert [axes.get_title() for axes in accuracy_figure([alone], []).axes if axes.get_visible()] == ["alone"]


def test_only_methods_that_were_run_are_in_the_legend_and_the_missing_ones_are_counted():
    lines = six()
    figure = accuracy_figure([panel({name: lines[name] for name in ("fedlalr", "fedavg")})], [])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FedLALR", "FedAvg"]
    assert "Not run: 4 curves of " in foot(figure)


def test_a_method_with_other_settings_has_its_colour_and_a_line_style_of_its_own():
    tuned = Beside("fedadam", (("server_lr", 0.1),))
    result = panel(six() | {tuned.key: curves(rising(0.5))}, beside=[tuned])
    look, printed = method_looks(result)[tuned.key], METHOD_LOOKS["fedadam"]
    assert look["color"] == printed["color"]
    assert look["linestyle"] != printed["linestyle"]
    figure = accuracy_figure([result], [])
    assert "FedAdam, server_lr 0.1" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert len([line for line in figure.axes[0].get_lines() if len(line.get_xdata()) > 1]) == 7


def test_several_settings_of_a_method_are_told_apart():
    tuned = [Beside("lafedopt", (("lr", lr),)) for lr in (0.1, 0.2, 0.3)] + [Beside("fedavg", (("lr", 0.1),))]
    result = panel(six() | {one.key: curves(rising(0.5)) for one in tuned}, beside=tuned)
    looks = {
        key: (look["color"], str(look["linestyle"]), look["linewidth"]) for key, look in method_looks(result).items()
    }
    assert len(set(looks.values())) == len(PAPER_METHODS) + 4
    figure = accuracy_figure([result], [])
    assert len([axes for axes in figure.axes if axes.get_visible()]) == 1
    assert len(figure.legends[0].get_texts()) == len(PAPER_METHODS) + 4


def test_shakespeare_has_accuracy_above_loss_for_both_settings():
    figure = shakespeare_figure([panel(six(), "roles", "non-IID"), panel(six(), "pooled", "IID")], [])
    assert [axes.get_title() for axes in figure.axes] == ["roles", "pooled", "", ""]
    assert [figure.axes[i].get_ylabel() for i in (0, 2)] == ["test accuracy", "test loss"]


def test_many_methods_with_other_settings_have_panels_of_their_own():
    tuned = [Beside(method, (("lr", 0.1),)) for method in PAPER_METHODS]
    lines = six() | {one.key: curves(rising(0.3 + 0.1 * i)) for i, one in enumerate(tuned)}
    both = [panel(lines, "roles", "non-IID", beside=tuned), panel(lines, "pooled", "IID", beside=tuned)]
    figure = shakespeare_figure(both, [])
    titles = ["roles\nas printed", "pooled\nas printed", "roles\ntuned", "pooled\ntuned"]
    assert [axes.get_title() for axes in figure.axes] == 2 * titles
    printed, others = lines_of(figure.axes[0]), lines_of(figure.axes[2])
    assert set(printed) == set(others)
    assert all(printed[colour].get_linestyle() == others[colour].get_linestyle() for colour in printed)
    assert others[METHOD_LOOKS["lafedopt"]["color"].upper()].get_ydata() == pytest.approx(rising(0.8))
    assert figure.legends[0].get_texts()[0].get_text() == "FedLALR"
    assert len(figure.legends[0].get_texts()) == len(PAPER_METHODS)
    assert "Tuned: FedLALR lr 0.1; FedAvg lr 0.1" in foot(figure)
    figure = accuracy_figure(both[:1], [])
    assert [axes.get_title() for axes in figure.axes] == ["roles\nas printed", "roles\ntuned"]


def test_every_panel_that_compares_has_all_methods():
    tuned = [Beside(method, (("lr", 0.1),)) for method in PAPER_METHODS[:3]]
    lines = six() | {one.key: curves(rising(0.7)) for one in tuned}
    figure = accuracy_figure([panel(lines, beside=tuned)], [])
    assert [len(lines_of(axes)) for axes in figure.axes] == [len(PAPER_METHODS)] * 2
    assert "FedAdam lr 0.1; the others as printed." in foot(figure)
    partly = panel({key: one for key, one in lines.items() if key != tuned[1].key}, "harder", beside=tuned)
    figure = accuracy_figure([panel(lines, "easy", beside=tuned), partly], [])
    titles = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert titles == ["easy\nas printed", "easy\ntuned", "harder\nas printed"], "no panel without FedAvg"
    assert "Not run: 1 curve of harder." in foot(figure)


def test_the_end_of_the_best_curves_is_enlarged():
    figure = accuracy_figure([panel(six(fedadam=rising(0.1)))], [])
    (zoom,) = figure.axes[0].child_axes
    assert set(lines_of(zoom)) == set(lines_of(figure.axes[0])) - {METHOD_LOOKS["fedadam"]["color"].upper()}
    assert all(line.get_xdata()[0] > ROUNDS / 2 for line in zoom.get_lines())
    alone = accuracy_figure([panel({"fedlalr": curves(rising(0.5))})], [])
    assert not alone.axes[0].child_axes


def test_lines_of_fedlalr_alone_are_shades_of_its_colour_and_of_no_other_method():
    figure = interval_figure([interval_panel("steps", [curves(rising(0.6))] * 3)], [])
    drawn = set(lines_of(figure.axes[0]))
    assert METHOD_LOOKS["fedlalr"]["color"].upper() in drawn
    assert not drawn & {METHOD_LOOKS[method]["color"].upper() for method in PAPER_METHODS[1:]}


def test_a_loss_that_explodes_does_not_flatten_the_others():
    wild = curves(rising(0.1), loss=[np.full(ROUNDS, 1e6)])
    figure = shakespeare_figure([panel(six(fedadam=wild))], [])
    assert figure.axes[1].get_ylim()[1] < 10


def test_scalability_draws_fedlalr_against_passes_over_the_data():
    usual = curves(rising(0.6), passes=2.5)
    half = six(fedlalr=curves(rising(0.6), passes=1.25))
    more = six(fedlalr=curves(rising(0.6), passes=3.75))
    figure = scalability_figure(
        [panel(half, short="25 clients a round"), panel(more, short="75 clients a round"), panel({"fedlalr": usual})],
        [],
    )
    assert figure.axes[0].get_ylim()[0] < 0  # the words stand below a method that learns nothing
    last = figure.axes[-1]
    ends = sorted(line.get_xdata()[-1] for line in last.get_lines() if len(line.get_xdata()) > 1)
    assert ends == [1.25 * ROUNDS, 2.5 * ROUNDS, 3.75 * ROUNDS]
    assert last.get_xlabel() == "passes over the data"
    (zoom,) = last.child_axes
    assert sorted(line.get_xdata()[-1] for line in zoom.get_lines()) == ends
    assert all(line.get_xdata()[0] > 1.25 * ROUNDS / 2 for line in zoom.get_lines())


def test_intervals_are_drawn_in_accuracy_and_both_losses():
    figure = interval_figure([interval_panel("steps", [curves(rising(0.6))] * 3)], [])
    assert [axes.get_ylabel() for axes in figure.axes] == ["test accuracy", "test loss", "training loss"]
    assert all(len(lines_of(axes)) == 3 for axes in figure.axes)
    assert figure.legends[0].get_title().get_text() == "FedLALR's interval K_t in round t"


def test_all_panels_of_the_intervals_name_the_best_end():
    ends = zip((0.6, 0.7, 0.5), (0.9, 1.0, 0.8), strict=True)
    lines = [replace(curves(np.full(ROUNDS, end)), train_loss=np.full((1, ROUNDS), loss)) for end, loss in ends]
    figure = interval_figure([interval_panel("steps", lines)], [])
    second, third = list(INTERVALS)[1:]
    assert [told(axes) for axes in figure.axes] == [
        [f"best end: {second}, 70.0 %"], [f"best end: {second}, 0.69"], [f"best end: {third}, 0.80"],
    ]  # fmt: skip
    enlarged = [line.get_ydata()[-1] for line in figure.axes[2].child_axes[0].get_lines()]
    assert enlarged == [0.9, 1.0, 0.8]


def test_trajectories_have_a_panel_for_every_round_and_a_line_for_every_client():
    recorded = curves(rising(0.5), trajectories=[points()])
    figure = trajectory_figure([panel({"fedlalr-trajectory": recorded})], [])
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["round 1", "round 8", "round 16", "round 23"] * 2
    assert all(len(lines_of(axes)) == 2 for axes in figure.axes)  # by colour
    assert [line.get_ydata().tolist() for line in figure.axes[0].get_lines()] == [[1, 2, 3], [2, 4, 6]]
    assert "band from 5 % to 95 %" in foot(figure)


def test_a_trajectory_that_was_not_run_is_an_empty_figure_that_says_so():
    assert "No run yet." in foot(trajectory_figure([panel({})], []))


def test_figures_are_written_as_image_and_vectors_for_one_column_and_the_same_each_time(tmp_path):
    def draw():
        return accuracy_figure([panel(six())], ["A note."])

    before = dict(mpl.rcParams)
    paths = save(draw, tmp_path / "new" / "cifar")
    assert [path.name for path in paths] == ["cifar.png", "cifar.svg", "cifar.pdf"]
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG", b"<?xm", b"%PDF"]
    again = save(draw, tmp_path / "again" / "cifar")
    assert [path.read_bytes() for path in paths] == [path.read_bytes() for path in again]
    assert dict(mpl.rcParams) == before
    assert draw().get_figwidth() == WIDTH
