import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedlalr.config import Config, load, with_method
from fedlalr.report import compare
from fedlalr.report.comparison import Comparison, Curve
from fedlalr.report.figures import _measured, accuracy_figure
from fedlalr.report.tables import comparison_table, default_rates_notes
from report.curves import curve

RUNS = {
    "fedavg": [curve([0.2, 0.5, 0.8]), curve([0.1, 0.7, 0.7]), curve([0.1, 0.2, 0.75])],
    "fedlalr": [curve([0.6, 0.8, 0.9], 3), curve([0.5, 0.8, 0.85], 3), curve([0.5, 0.9, 0.86], 3)],
    "fedadam": [curve([0.2, 0.3], failure="round 3: not finite"), curve([0.1, 0.7, 0.8]), curve([0.1, 0.7, 0.8])],
}
SETTINGS: dict[str, dict[str, float]] = {name: {"lr": 0.1} for name in RUNS}


@pytest.fixture
def comparison() -> Comparison:
    return compare(RUNS, SETTINGS, target=0.7)


def test_the_best_comes_first_and_a_method_that_failed_last(comparison: Comparison) -> None:
    assert [outcome.method for outcome in comparison.outcomes] == ["fedlalr", "fedavg", "fedadam"]


def test_rounds_megabytes_and_seconds_are_counted_to_the_first_round_at_the_target(comparison: Comparison) -> None:
    fedlalr, fedavg, _ = comparison.outcomes
    assert fedlalr.rounds_to_target == (2, 2, 2)
    assert fedlalr.megabytes_to_target == (13.0, 13.0, 13.0)
    assert fedavg.rounds_to_target == (3, 2, 3)
    assert fedavg.megabytes_to_target == (7.5, 5.0, 7.5)
    assert fedavg.seconds_to_target == (6.0, 4.0, 6.0)


def test_an_accuracy_reached_and_lost_again_counts() -> None:
    outcome = compare({"fedavg": [curve([0.9, 0.1])]}, SETTINGS, target=0.9).best
    assert outcome.rounds_to_target == (1,)
    assert outcome.finals == (0.1,)


def test_differences_are_paired_with_the_best(comparison: Comparison) -> None:
    best, fedavg, failed = comparison.outcomes
    assert best.to_best is None
    assert failed.to_best is None
    assert fedavg.to_best is not None
    assert fedavg.to_best.mean == pytest.approx((-0.1 - 0.15 - 0.11) / 3)
    assert fedavg.to_best.excludes_zero


def test_the_default_target_is_one_that_every_method_comes_near() -> None:
    runs = {"fedavg": [curve([0.8])], "fedlalr": [curve([0.9])]}
    assert compare(runs, SETTINGS).target == 0.76
    assert compare({"fedavg": [curve([], failure="round 1")]}, SETTINGS).target == 0.5


def test_a_method_that_did_not_learn_does_not_set_the_target() -> None:
    comparison = compare({"fedavg": [curve([0.8])], "fedlalr": [curve([0.1])]}, SETTINGS)
    assert comparison.target == 0.76
    assert comparison.outcomes[1].rounds_to_target == (None,)


def test_unequal_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="one run per seed"):
        compare({"fedavg": [curve([0.8])], "fedlalr": []}, SETTINGS)


def test_the_table_says_what_the_seeds_allow(comparison: Comparison) -> None:
    table = comparison_table(comparison)
    rows = {row[0]: row for row in table.rows}
    assert rows["FedLALR"] == (
        "FedLALR",
        "87.0 ± 2.6",
        "–",
        "2 ± 0",
        "13.0 ± 0.0",
        "4.00 ± 0.00",
        "19.5",
        "6.00 ± 0.00",
    )
    assert rows["FedAvg"][3] == "3 ± 1"
    assert rows["FedAdam"][3] == "2 ± 0 (2/3)"
    assert any("only k of 3 seeds" in note for note in table.notes)
    assert any("FedAdam failed: round 3: not finite" in note for note in table.notes)
    assert table.heading[3] == "rounds to 70%"


@pytest.mark.parametrize(("target", "written"), [(0.57, "57%"), (0.125, "12.5%"), (0.855, "85.5%"), (0.004, "0.4%")])
def test_a_target_that_is_no_whole_per_cent_is_written_out(target: float, written: str) -> None:
    heading = comparison_table(compare({"fedavg": [curve([0.8])]}, SETTINGS, target)).heading
    assert heading[3:6] == (f"rounds to {written}", f"MB to {written}", f"seconds to {written}")


def test_methods_that_seeds_cannot_tell_apart_are_named() -> None:
    close = {
        "fedavg": [curve([0.80]), curve([0.90]), curve([0.85])],
        "fedlalr": [curve([0.82]), curve([0.89]), curve([0.86])],
    }
    notes = comparison_table(compare(close, SETTINGS)).notes
    assert "Indistinguishable from FedLALR with 3 seeds: FedAvg." in notes


def test_two_seeds_are_too_few_to_call_methods_indistinguishable() -> None:
    apart = {"fedavg": [curve([0.10]), curve([0.23])], "fedlalr": [curve([0.80]), curve([0.81])]}
    alike = {"fedadam": [curve([0.101]), curve([0.112])]}  # nearly the same difference twice, so it excludes zero
    notes = comparison_table(compare({**apart, **alike}, SETTINGS | {"fedadam": {}})).notes
    assert "2 seeds are too few to tell FedAvg from FedLALR; use --seeds 3 or more." in notes
    assert "Indistinguishable" not in " ".join(notes)


def test_methods_with_the_same_difference_in_every_seed_are_not_told_apart() -> None:
    level = {
        "fedavg": [curve([0.877]), curve([0.777]), curve([0.677])],
        "fedlalr": [curve([0.9]), curve([0.8]), curve([0.7])],
    }
    table = comparison_table(compare(level, SETTINGS))
    assert table.rows[1][2] == "-2.3"
    assert "Indistinguishable from FedLALR with 3 seeds: FedAvg." in table.notes
    assert any("no spread for an interval: FedAvg." in note for note in table.notes)


def test_one_seed_is_said_to_be_too_few() -> None:
    table = comparison_table(compare({"fedavg": [curve([0.8])], "fedlalr": [curve([0.9])]}, SETTINGS, target=0.95))
    assert table.rows[0][:6] == ("FedLALR", "90.0", "–", "not reached", "not reached", "not reached")
    assert table.rows[1][2] == "-10.0"
    assert any("One seed" in note for note in table.notes)


def test_default_rates_are_noted_when_methods_are_compared() -> None:
    own = ["model=mine:make", "data=mine:clients"]
    preset, without, chosen = load("quickstart"), load(None, own), load(None, [*own, "methods.fedavg.lr=0.5"])

    def noted(config: Config, *methods: str) -> list[str]:
        notes = default_rates_notes({name: with_method(config, name) for name in methods})
        return [note.partition(" default")[0] for note in notes]

    assert noted(without, "fedavg", "fedadamw") == ["fedavg, fedadamw use"]
    assert noted(without, "fedadamw") == []
    assert noted(chosen, "fedavg", "fedadamw") == ["fedadamw uses"]
    assert noted(preset, "fedavg", "fedadam") == []
    assert noted(preset, "scaffold", "fedadamw") == ["scaffold, fedadamw use"]


def test_markdown_has_a_line_for_every_method(comparison: Comparison) -> None:
    lines = comparison_table(comparison).markdown().splitlines()
    assert lines[1].startswith("|---|---:|")
    assert sum(line.startswith("| Fed") for line in lines) == 3


def test_the_plain_form_is_json(comparison: Comparison) -> None:
    plain = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert plain["best"] == "fedlalr"
    assert plain["methods"][0]["final"]["mean"] == pytest.approx(0.87)
    assert plain["methods"][2]["failures"] == ["round 3: not finite", None, None]


def test_the_figure_is_drawn_twice_and_the_same_each_time(tmp_path: Path) -> None:
    first = accuracy_figure(RUNS, tmp_path / "a", "title", target=0.7)
    second = accuracy_figure(RUNS, tmp_path / "b", "title", target=0.7)
    assert [path.name for path in first] == ["a.png", "a.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    svg = first[1].read_text(encoding="utf-8")
    for words in ("FedLALR", "FedAvg", "FedAdam", "round", "megabytes sent", "test accuracy"):
        assert words in svg


def test_dollars_in_a_title_begin_no_formula(tmp_path: Path) -> None:
    svg = accuracy_figure(RUNS, tmp_path / "a", "costs_$x^^$: 2 seeds")[1].read_text(encoding="utf-8")
    assert "costs_$x^^$: 2 seeds" in svg


def test_megabytes_are_written_as_plain_numbers(tmp_path: Path) -> None:
    svg = accuracy_figure(RUNS, tmp_path / "a", "title")[1].read_text(encoding="utf-8")
    assert "×" not in svg
    assert {"5", "10"} <= set(re.findall(r">([\d.]+)</text>", svg))


def test_a_method_without_a_round_is_left_out_of_the_figure(tmp_path: Path) -> None:
    runs = {"fedavg": [Curve([], "round 1: not finite")], "fedlalr": [curve([0.5])]}
    assert "FedAvg" not in accuracy_figure(runs, tmp_path / "a", "title")[1].read_text(encoding="utf-8")


def test_megabytes_of_small_models_have_digits_enough() -> None:
    small = {
        name: [Curve([replace(r, bytes_up=700, bytes_down=700)])]
        for name in ("fedlalr", "fedavg")
        for r in curve([0.5]).records
    }
    table = comparison_table(compare(small, {name: {} for name in small}))
    assert {row[table.heading.index("MB sent")] for row in table.rows} == {"0.0014"}


def test_bytes_are_counted_by_direction() -> None:
    [record] = curve([0.5]).records
    both = Curve([replace(record, bytes_up=2_000_000, bytes_down=3_000_000)] * 2)
    assert both.megabytes(down=False) == [2, 4]
    assert both.megabytes(up=False) == [3, 6]
    assert both.megabytes() == [5, 10]


def test_rounds_without_an_accuracy_are_left_out() -> None:
    runs = {"fedlalr": [curve([None, 0.4, None, 0.8, None])], "fedavg": [curve([None, 0.5, None, 0.6, None])]}
    found = compare(runs, {name: {} for name in runs}, target=0.7)
    assert [outcome.finals for outcome in found.outcomes] == [(0.8,), (0.6,)]
    assert found.best.rounds_to_target == (4,)
    rounds, accuracies = _measured(runs["fedlalr"])
    assert (rounds.tolist(), accuracies.tolist()) == ([1, 3], [[0.4, 0.8]])
