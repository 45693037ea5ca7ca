"""Runs without an accuracy are compared by their final loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedlalr as fl
from fedlalr.federation.record import Distribution, judged_losses, judged_on, loss_name
from fedlalr.report.comparison import Curve, compare
from fedlalr.report.groups import group_runs
from fedlalr.report.html import write_report
from fedlalr.report.losses import losses_table
from fedlalr.report.runs import ReportedRun
from fedlalr.report.sections import comparison_section
from report.curves import curve

SETTINGS: dict[str, dict[str, object]] = {"a": {}, "b": {}}


def reported(method: str, seed: int, loss: float, other: Mapping[str, object] | None = None) -> ReportedRun:
    (record,) = curve([None]).records
    facts = {"algorithm": method, "seed": seed, "data.inputs": "30 samples", "loss": "mse_loss", **(other or {})}
    return ReportedRun(Path(f"{method}-{seed}"), [replace(record, loss=loss, train_loss=1.0)], facts=facts)


def test_the_lowest_loss_comes_first_with_paired_differences() -> None:
    runs = [reported("FedAvg", seed, loss) for seed, loss in enumerate((0.5, 0.7, 0.6))]
    runs += [reported("SCAFFOLD", seed, loss) for seed, loss in enumerate((0.3, 0.4, 0.35))]
    runs += [reported("FedProx", seed, loss) for seed, loss in enumerate((0.5, 0.3, 0.4))]
    table = comparison_section(group_runs(runs))
    assert table is not None
    assert [row[0] for row in table.rows] == ["SCAFFOLD", "FedProx", "FedAvg"]
    assert table.rows[0][1:3] == ("0.35 ± 0.05", "–")
    assert table.rows[2][2] == "+0.25 [+0.126, +0.374]"
    assert table.notes[-1] == "Indistinguishable from SCAFFOLD with 3 seeds: FedProx."


def test_what_is_not_finite_comes_last_and_differs_by_nothing() -> None:
    runs = [reported("FedAvg", 0, float("nan")), reported("SCAFFOLD", 0, 0.5)]
    table = comparison_section(group_runs(runs))
    assert table is not None
    assert [row[:3] for row in table.rows] == [("SCAFFOLD", "0.5", "–"), ("FedAvg", "not finite", "–")]
    assert table.notes == ("One seed: there is no spread to judge differences by; use --seeds.",)


def test_a_failed_run_has_no_final_loss() -> None:
    failed, other = reported("FedAvg", 0, 0.1), reported("SCAFFOLD", 0, 0.5)
    comparison = compare(
        {"a": [Curve(failed.records, "round 2: x is not finite")], "b": [Curve(other.records)]}, SETTINGS
    )
    table = losses_table(comparison)
    assert [row[:2] for row in table.rows] == [("b", "0.5"), ("a", "failed")]
    assert table.notes[-1] == "a failed: round 2: x is not finite"
    assert comparison.as_dict()["best"] == "b"


def test_losses_on_other_samples_are_not_compared() -> None:
    trained, other = reported("FedAvg", 0, 1.0), reported("SCAFFOLD", 0, 1.0)
    over = {"loss": Distribution(0.7, 0.1, 0.9, 4)}
    evaluated = replace(other, records=[replace(record, per_client=over) for record in other.records])
    assert comparison_section(group_runs([trained, other])) is not None
    assert comparison_section(group_runs([trained, evaluated])) is None


@pytest.mark.parametrize("other", [{"loss": "l1_loss"}, {"data.inputs": "40"}, {"test.inputs": "9"}, {"seed": 1}])
def test_runs_of_another_loss_other_data_or_another_seed_are_not_compared(other: dict[str, object]) -> None:
    runs = [reported("FedAvg", 0, 0.5), reported("SCAFFOLD", 0, 0.4, other)]
    assert comparison_section(group_runs(runs)) is None


@pytest.mark.parametrize("held_out", ["test set", "clients", ""])
def test_the_page_of_a_regression_compares_its_methods(tmp_path: Path, held_out: str) -> None:
    inputs = torch.randn(4, 20, 1, generator=torch.Generator().manual_seed(0))
    clients = [(own, 3 * own) for own in inputs]
    for method in (fl.FedAvg(lr=0.05), fl.FedLALR(lr=0.05)):
        for seed in (0, 1):
            fl.run(
                nn.Linear(1, 1), clients, method, rounds=2, seed=seed, loss=nn.functional.mse_loss,
                test=clients[0] if held_out == "test set" else None, holdout=0.2 if held_out == "clients" else None,
                run_dir=tmp_path / type(method).__name__ / str(seed),
            )  # fmt: skip
    text = write_report([tmp_path], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h3>Methods compared</h3>" in text
    name = {"test set": "test loss", "clients": "held-out loss", "": "training loss"}[held_out]
    for cell in (f"final {name}", name):
        assert f"<th scope='col'>{cell}</th>" in text
    assert ("training loss in the last round" in text) is (held_out == "")
    assert ("held-out samples.</" in text) is (held_out == "clients")


def test_without_a_test_set_the_loss_is_that_of_the_clients_held_out_samples() -> None:
    (record,) = curve([None]).records
    trained = replace(record, loss=0.5, train_loss=0.5)
    evaluated = replace(trained, per_client={"loss": Distribution(0.7, 0.1, 0.9, 4)})
    tested = replace(evaluated, loss=0.6)
    assert judged_losses([trained, evaluated]) == [None, 0.7]
    assert judged_losses([tested, tested]) == [0.6, 0.6]
    assert judged_losses([trained, trained]) == [0.5, 0.5]
    assert judged_losses([]) == []
    assert list(map(judged_on, ([trained, evaluated], [tested], [trained], []))) == [
        "held-out", "test", "training", "training",
    ]  # fmt: skip
    diverged = replace(evaluated, loss=math.nan, train_loss=math.nan)
    assert judged_on([diverged]) == "held-out"
    assert [loss_name(record) for record in (tested, trained, diverged)] == ["test loss", *["training loss"] * 2]
    run = Curve([trained, evaluated])
    assert losses_table(compare({"a": [run]}, SETTINGS)).rows[0][1] == "0.7"
    assert run.losses == pytest.approx([math.nan, 0.7], nan_ok=True)  # of the figure
