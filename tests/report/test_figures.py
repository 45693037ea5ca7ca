"""What the figures of runs show: which line is best, what is enlarged, and in which colours."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from matplotlib.colors import to_hex

from fedlalr.common.colours import COLOURS
from fedlalr.config import load, presets
from fedlalr.data.partition import Scheme
from fedlalr.data.sources import SOURCES
from fedlalr.federation.record import Distribution
from fedlalr.report.comparison import Curve
from fedlalr.report.figures import Panel, draw
from fedlalr.report.line_styles import look_of, looks_of
from fedlalr.report.rerun_command import NETWORKS, SCHEMES, title_of
from fedlalr.report.tables import DATA_NAMES
from report.curves import curve

ROUNDS = Panel("round", Curve.rounds)
MEGABYTES = Panel("megabytes", Curve.megabytes)
SLOW = [curve([0.1, 0.3, 0.5, 0.7, 0.8, 0.8, 0.8, 0.8, 0.86, 0.9])]  # 2.5 MB a round
COSTLY = [curve([0.1, 0.5, 0.7, 0.8, 0.8, 0.8, 0.8, 0.8, 0.84, 0.88], vectors=3)]  # 6.5 MB a round
FLAT = [curve([0.1] * 10)]
RUNS = {"FedAvg": SLOW, "FedLALR": COSTLY, "FedAdam": FLAT}


def drawn(runs, panels=(ROUNDS, MEGABYTES), target=None):
    return draw(runs, list(runs), panels, "title", target)


def colours_in(axes):
    return {to_hex(line.get_color()) for line in axes.get_lines() if len(line.get_xdata()) > 2}


def colour_of(method):
    return COLOURS[look_of(method).colour]


def test_every_panel_names_its_best_line_in_its_colour() -> None:
    by_rounds, by_bytes = drawn(RUNS, target=0.7).axes[:2]
    assert by_rounds.get_title() == "best in the last round:\nFedAvg, 90 %"
    assert by_bytes.get_title() == "fewest megabytes to 70 %:\nFedAvg, 10 MB"
    dear = drawn({**RUNS, "FedAvg": [curve([0.1] * 9 + [0.7])]}, target=0.7).axes[:2]
    assert [axes.get_title().splitlines()[1] for axes in dear] == ["FedLALR, 88 %", "FedLALR, 20 MB"]
    assert {to_hex(axes.title.get_color()) for axes in dear} == {colour_of("FedLALR")}


def test_lines_that_are_equally_good_are_all_named() -> None:
    for axes, title in zip(
        drawn({"FedAvg": SLOW, "FedLALR": COSTLY, "FedAdam": SLOW}, target=0.7).axes[:2],
        ("best in the last round:\nFedAvg and FedAdam, 90 %", "fewest megabytes to 70 %:\nFedAvg and FedAdam, 10 MB"),
        strict=True,
    ):
        assert axes.get_title() == title
        assert to_hex(axes.title.get_color()) == "#000000"


def test_the_cheapest_line_is_the_table_s_in_which_every_seed_reaches_the_target() -> None:
    early = [curve([0.9, 0.9, 0.9]), curve([0.1, 0.1, 0.1])]
    late = [curve([0.1, 0.8, 0.8]), curve([0.1, 0.1, 0.8])]
    axes = drawn({"FedAvg": early, "FedLALR": late}, target=0.7).axes[1]
    assert axes.get_title() == "fewest megabytes to 70 %:\nFedLALR, 6.2 MB"  # the mean of 5 and 7.5


def test_without_a_target_one_is_chosen_that_every_method_that_learned_comes_near() -> None:
    assert drawn(RUNS).axes[1].get_title() == "fewest megabytes to 83 %:\nFedAvg, 22 MB"


def test_a_failed_method_is_not_the_best() -> None:
    failed = [curve([0.9, 0.99], failure="round 3: not finite")]
    axes = drawn({**RUNS, "LAFedOpt": failed}).axes[0]
    assert axes.get_title().endswith("FedAvg, 90 %")


def test_the_end_of_the_best_curves_and_the_rise_to_the_target_are_enlarged_and_framed() -> None:
    figure = drawn(RUNS, target=0.7)
    whole, cost, ends, rise = figure.axes
    assert colours_in(ends) == {colour_of("FedAvg"), colour_of("FedLALR")}
    assert ends.get_xlim()[0] > 6
    assert 0.7 < ends.get_ylim()[0] < ends.get_ylim()[1] < 0.95
    assert rise.get_xlim() == pytest.approx((0.5 * 10, 1.3 * 19.5))
    assert rise.get_ylim()[0] == pytest.approx(0.56)
    assert rise.get_xscale() == cost.get_xscale() == "log"
    for above, below in ((whole, ends), (cost, rise)):
        (frame,) = above.patches
        assert (frame.get_x(), frame.get_x() + frame.get_width()) == pytest.approx(below.get_xlim())
        assert (frame.get_y(), frame.get_y() + frame.get_height()) == pytest.approx(below.get_ylim())


def test_a_single_line_has_no_best_and_nothing_enlarged() -> None:
    figure = drawn({"FedAvg": SLOW})
    assert len(figure.axes) == 2
    assert [axes.get_title() for axes in figure.axes] == ["", ""]


def test_losses_are_drawn_without_a_target_or_per_cent() -> None:
    axes, *others = drawn({"FedAvg": [curve([None] * 3)], "FedLALR": SLOW}, [MEGABYTES._replace(losses=True)]).axes
    assert not others
    assert [line.get_ydata().tolist() for line in axes.get_lines()] == [[1.0] * 3, [1.0] * 10]
    assert (axes.get_ylabel(), axes.get_title()) == ("test loss", "")
    assert axes.get_ylim()[1] > 1
    assert "%" not in axes.yaxis.get_major_formatter()(0.5)


def test_the_axis_names_the_samples_that_an_accuracy_is_of_if_they_are_the_same() -> None:
    (own,) = RUNS["FedAvg"][:1]
    over = {"accuracy": Distribution(0.5, 0.1, 0.4, 4)}
    clients = Curve([replace(record, loss=record.train_loss, per_client=over) for record in own.records])
    labels = [drawn(runs).axes[0].get_ylabel() for runs in (RUNS, {"A": [clients]}, {"A": [clients], "B": [own]})]
    assert labels == ["test accuracy", "held-out accuracy", "accuracy"]


def test_an_accuracy_that_one_method_reaches_is_not_enlarged() -> None:
    figure = drawn({"FedAvg": SLOW, "FedAdam": FLAT}, (MEGABYTES,), target=0.7)
    assert len(figure.axes) == 1
    assert figure.axes[0].get_title().endswith("FedAvg, 10 MB")


def test_every_panel_has_the_same_lines_and_the_legend_has_each_once() -> None:
    figure = drawn(RUNS)
    assert colours_in(figure.axes[0]) == colours_in(figure.axes[1]) == {colour_of(method) for method in RUNS}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(RUNS)


def test_a_compressed_method_has_the_colour_of_the_method_and_another_dash() -> None:
    lines = ["FedAvg (balanced)", "FedLALR (smallest)", "FedAvg", "FedLALR", "mine (balanced)", "mine"]
    looks = dict(zip(lines, looks_of(lines), strict=True))
    for compressed in (line for line in lines if "(" in line):
        plain = looks[compressed.partition(" (")[0]]
        assert looks[compressed].colour == plain.colour
        assert looks[compressed].dash != plain.dash
    assert (looks["FedAvg"], looks["FedLALR"]) == (look_of("FedAvg"), look_of("FedLALR"))


@pytest.mark.parametrize(
    ("preset", "overrides", "title"),
    [
        ("quickstart", [], "Digits, perceptron, 10 of 100 clients, Dirichlet 0.3"),
        ("quickstart", ["partition=iid", "clients_per_round=null"], "Digits, perceptron, 100 clients, IID"),
        ("vit-cifar10", [], "CIFAR-10, vision transformer, 50 of 100 clients, Dirichlet 0.6"),
        ("shakespeare", [], "Shakespeare, LSTM, 10 of 100 clients, natural partition"),
    ],
)
def test_a_title_says_what_is_shown(preset: str, overrides: list[str], title: str) -> None:
    assert title_of(load(preset, overrides)) == title


def test_every_data_set_scheme_and_network_of_a_preset_has_a_title() -> None:
    assert set(DATA_NAMES) == set(SOURCES)
    assert set(SCHEMES) == set(get_args(Scheme))
    assert {load(name).model.name for name in presets()} <= set(NETWORKS)


def test_own_data_has_its_name_and_no_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_titles.py").write_text("def clients(): ...\ndef net(): ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    config = load(None, ["data=own_titles:clients", "model=own_titles:net"])
    assert title_of(config) == "own_titles:clients, own_titles:net"
