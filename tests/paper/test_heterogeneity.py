import csv

import numpy as np
import pytest

from fedlalr.paper.figures import draw_heterogeneity
from fedlalr.paper.heterogeneity import Dealt, deal, label_figure, labels_by_alpha, write_labels
from fedlalr.paper.plans import Request

BARE = Request("smoke", frozenset({"digits"}))
EVEN = np.full((4, 3), 2)
SKEWED = np.array([[6, 0, 0], [0, 6, 0], [3, 3, 0], [0, 0, 6]])


def test_partitions_have_the_papers_hundred_clients_at_both_parameters_for_every_seed():
    dealt, notes = deal(BARE, seeds=2)
    assert [(one.data, one.alpha, one.seed) for one in dealt] == [
        ("Digits", alpha, seed) for alpha in (0.6, 0.3) for seed in (0, 1)
    ]
    assert {one.counts.shape for one in dealt} == {(100, 10)}
    assert all(one.counts.sum() == 1442 for one in dealt)
    assert "Digits stand in for CIFAR-10, which is not on this machine." in notes


def test_labels_are_averaged_over_clients_for_each_seed():
    dealt = [Dealt("a", 0.6, 0, EVEN), Dealt("a", 0.3, 0, SKEWED), Dealt("a", 0.3, 1, EVEN)]
    assert labels_by_alpha(dealt) == {"a": {0.6: [3.0], 0.3: [1.25, 3.0]}}


def test_the_map_leaves_clients_white_where_they_have_nothing():
    figure = label_figure([Dealt("a", 0.6, 0, EVEN), Dealt("a", 0.3, 0, SKEWED)], ["A note."])
    maps = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert [int(np.ma.count_masked(one)) for one in maps] == [0, 7]
    assert "1.2 labels per client" in figure.axes[1].get_title()
    assert "A note." in figure.get_supxlabel()


def test_the_table_has_a_line_for_every_label_of_a_client(tmp_path):
    with write_labels([Dealt("a", 0.3, 0, SKEWED)], tmp_path / "labels.csv").open(newline="") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["data", "alpha", "seed", "client", "class", "samples"]
    assert lines[1:] == [
        ["a", "0.3", "0", client, label, samples]
        for client, label, samples in (
            ("0", "0", "6"),
            ("1", "1", "6"),
            ("2", "0", "3"),
            ("2", "1", "3"),
            ("3", "2", "6"),
        )
    ]


def test_the_figure_comes_with_its_table_and_verdict(tmp_path):
    drawn = draw_heterogeneity(BARE, tmp_path, seeds=1)
    assert {path.suffix for path in drawn.files} == {".png", ".svg", ".pdf", ".csv"}
    assert [claim.key for claim in drawn.claims] == ["8"]
    assert drawn.claims[0].checks[0].seeds == (0,)


@pytest.mark.data
def test_cifar10_has_about_as_many_labels_a_client_as_a_simulation_of_the_rule_gives():
    dealt, _ = deal(Request("paper", frozenset({"cifar10"})), seeds=1)
    means = labels_by_alpha(dealt)["CIFAR-10"]
    assert means[0.6][0] == pytest.approx(9.3, abs=0.2)
    assert means[0.3][0] == pytest.approx(8.0, abs=0.2)
