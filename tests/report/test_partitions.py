from pathlib import Path

import pytest

from fedlalr import config
from fedlalr.report import partitions
from fedlalr.report.partitions import view_partitions
from fedlalr.report.runs import ReportedRun


def reported(preset: str, *overrides: str) -> ReportedRun:
    return ReportedRun(Path("run"), [], config.load(preset, overrides))


def test_runs_of_one_partition_are_viewed_once() -> None:
    runs = [reported("quickstart"), reported("quickstart", "algorithm=fedavg"), reported("quickstart", "seed=1")]
    first, second = view_partitions(runs)
    assert (first.label, second.label) == ("digits, dirichlet 0.3, seed 0", "digits, dirichlet 0.3, seed 1")
    assert first.counts is not None
    assert first.counts.shape == (100, 10)
    assert first.counts.sum() == 1442
    assert first.facts[0].startswith("1,442 samples")
    assert (second.counts != first.counts).any()


def test_data_that_is_not_here_is_said_and_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path))
    (view,) = view_partitions([reported("cifar100")])
    assert view.counts is None
    assert "fedlalr data fetch cifar100" in view.missing
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    (view,) = view_partitions([reported("cifar10", f"data.folder={tmp_path}")])
    assert view.counts is None
    assert "cannot be dealt again" in view.missing


def test_more_partitions_than_are_drawn_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "MOST_PARTITIONS", 1)
    views = view_partitions([reported("quickstart", f"seed={seed}") for seed in range(3)])
    assert [view.missing for view in views] == ["", "2 more partitions are not drawn."]


def test_runs_without_a_configuration_have_no_partition() -> None:
    assert view_partitions([ReportedRun(Path("run"), [])]) == []
