"""The quality over the clients in a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedlalr.federation.record import Distribution
from fedlalr.report.client_quality import clients_of, clients_table
from fedlalr.report.groups import group_runs
from fedlalr.report.html import page
from fedlalr.report.runs import ReportedRun
from report.curves import curve

Scores = Mapping[int, Mapping[str, Distribution]]


def reported(scores: Scores, seed: int = 0, rounds: int = 4) -> ReportedRun:
    records: Sequence = curve([None] * rounds).records
    records = [replace(record, per_client=scores.get(record.round, {})) for record in records]
    return ReportedRun(Path(f"run-{seed}"), records, facts={"algorithm": "FedAvg", "seed": seed})


def both(accuracy: float, loss: float) -> dict[str, Distribution]:
    return {"loss": Distribution(loss, 0.5, 2 * loss, 20), "accuracy": Distribution(accuracy, 0.25, accuracy / 2, 20)}


def test_the_table_has_the_last_evaluation_of_every_run():
    loss_only = {4: {"loss": Distribution(1.5, 0.5, 2.0, 7)}}
    runs = [reported({2: both(0.5, 2.0), 4: both(0.75, 1.0)}), reported(loss_only, seed=1), reported({}, seed=2)]
    table = clients_table(group_runs(runs))
    assert table is not None
    assert [row[1:] for row in table.rows] == [
        ("0", "4", "20", "75.0%", "25.0%", "37.5%", "1", "0.5", "2"),
        ("1", "4", "7", "–", "–", "–", "1.5", "0.5", "2"),
    ]


def test_curves_are_means_over_the_seeds_in_the_rounds_that_all_have():
    runs = [reported({2: both(0.5, 2.0), 4: both(0.75, 1.0)}), reported({2: both(0.75, 3.0)}, seed=1, rounds=3)]
    (group,) = group_runs(runs)
    found = clients_of(group)
    assert found is not None
    assert found["y"]["loss"] == {"x": [2], "mean": [2.5], "low": [2.0], "high": [3.0], "worst": [5.0]}
    assert found["y"]["accuracy"] == {"x": [2], "mean": [0.625], "low": [0.375], "high": [0.875], "worst": [0.3125]}


def test_the_band_of_an_accuracy_ends_at_one():
    (group,) = group_runs([reported({1: both(0.9, 1.0)})])
    found = clients_of(group)
    assert found is not None
    assert found["y"]["accuracy"]["high"] == [1.0]


@pytest.mark.parametrize("scores", [{}, {3: both(0.5, 1.0)}])
def test_the_page_says_whether_clients_were_evaluated(scores: Scores) -> None:
    text = page([reported(scores)])
    assert ("The clients were not evaluated" in text) == (not scores)
    assert ("accuracy, worst 10\N{NO-BREAK SPACE}%" in text) == bool(scores)
    assert '"clients":[{"look"' in text if scores else '"clients":[]' in text
    assert not clients_of(group_runs([reported({})])[0])
