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


@pytest.mark.parametrize(
    ("scheme", "option", "values"),
    [
        ("shards", "partition.classes_per_client", (1, 2)),
        ("lognormal", "partition.sigma", (0.5, 1.5)),
        ("dirichlet-classes", "partition.min_size", (0, 2)),
        ("iid", "partition.clients", (10, 20)),
        ("iid", "data.validation", (0.1, 0.2)),
    ],
)
def test_partitions_are_told_apart_by_what_they_were_dealt_with(
    scheme: str, option: str, values: tuple[float, float]
) -> None:
    runs = [reported("quickstart", f"partition={scheme}", "partition.alpha=1", f"{option}={one}") for one in values]
    labels = [view.label for view in view_partitions(runs)]
    skew = " 1" if scheme.startswith("dirichlet") else ""
    name = option.removeprefix("partition.")
    assert labels == [f"digits, {scheme}{skew}, {name} {one}, seed 0" for one in values]


def test_a_setting_that_a_scheme_does_not_read_makes_no_other_partition() -> None:
    runs = [reported("quickstart", "partition=iid", f"partition.alpha={alpha}") for alpha in (1, 2)]
    assert [view.label for view in view_partitions(runs)] == ["digits, iid, seed 0"]


def test_data_that_is_not_here_is_said_and_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path))
    (view,) = view_partitions([reported("cifar100")])
    assert view.counts is None
    assert "fedlalr data fetch cifar100" in view.missing
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    (view,) = view_partitions([reported("cifar10", f"data.folder={tmp_path}")])
    assert view.counts is None
    assert "cannot be recomputed" in view.missing


def test_more_partitions_than_are_drawn_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "MOST_PARTITIONS", 1)
    views = view_partitions([reported("quickstart", f"seed={seed}") for seed in range(3)])
    assert [view.missing for view in views] == ["", "2 more partitions are not shown."]


def test_runs_without_a_configuration_have_no_partition() -> None:
    assert view_partitions([ReportedRun(Path("run"), [])]) == []
