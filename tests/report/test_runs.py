from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedlalr as fl
from fedlalr.config import ConfigError
from fedlalr.report.runs import find_runs, read_run
from report.run_folders import make_run


def test_a_directory_above_runs_stands_for_them_without_the_tuning_runs(comparison_folder: Path) -> None:
    found = find_runs([comparison_folder])
    assert [run.relative_to(comparison_folder).as_posix() for run in found] == [
        "fedavg/seed-0",
        "fedavg/seed-1",
        "fedlalr/seed-0",
        "fedlalr/seed-1",
    ]


def test_a_run_named_twice_is_read_once(comparison_folder: Path) -> None:
    one = comparison_folder / "fedavg" / "seed-0"
    assert find_runs([one, comparison_folder / "fedavg"]) == [one, comparison_folder / "fedavg" / "seed-1"]


def test_runs_are_found_in_the_order_of_the_numbers_in_their_names(tmp_path: Path) -> None:
    names = [
        "alpha=0.05",
        "alpha=0.1",
        "alpha=2",
        "alpha=10",
        "clients=5/seed-2",
        "clients=5/seed-10",
        "clients=15/seed-1",
    ]
    for name in reversed(names):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    assert [run.relative_to(tmp_path).as_posix() for run in find_runs([tmp_path])] == names


def test_a_place_without_a_run_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing contains no run.*metrics\.jsonl"):
        find_runs([tmp_path / "nothing"])


def test_a_run_is_read_with_everything_it_wrote(comparison_folder: Path) -> None:
    run = read_run(comparison_folder / "fedlalr" / "seed-1")
    assert [record.round for record in run.records] == [1, 2, 3]
    assert run.seed == 1
    assert run.summary["status"] == "finished"
    assert run.failure is None
    assert run.choices["engine"] == "reference"
    assert set(run.versions) == {"python", "torch", "numpy", "instructions"}
    assert {(point.round, point.client) for point in run.trajectory} == {(1, 3), (1, 5), (3, 3), (3, 5)}


def test_a_run_from_python_is_known_by_its_checkpoint(tmp_path: Path) -> None:
    clients = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]
    fl.run(torch.nn.Linear(3, 2), clients, fl.FedAvg(lr=0.1), rounds=2, seed=7, engine="reference", run_dir=tmp_path)
    run = read_run(tmp_path)
    assert run.config is None
    assert run.seed == 7
    assert run.facts["algorithm.lr"] == 0.1
    assert run.summary == {}
    assert run.state == "started from Python"


def test_a_run_without_a_summary_is_over_when_all_its_rounds_are_there(comparison_folder: Path) -> None:
    run = read_run(comparison_folder / "fedavg" / "seed-0")
    assert replace(run, summary={}).state == "finished"
    assert replace(run, summary={}, records=run.records[:2]).state == "running or interrupted"
    assert replace(run, summary={"status": "interrupted"}).state == "interrupted"


def test_replies_that_made_a_round_fail_are_among_the_refused(tmp_path: Path) -> None:
    with pytest.raises(fl.RoundFailed):
        make_run(tmp_path, "algorithm=fedavg", "algorithm.lr=1e30")
    run = read_run(tmp_path)
    assert run.state == "failed"
    assert len(run.records) == 0
    assert [round for round, _ in run.rejections] == [1] * 4
    assert run.summary["rejected"] == 4
    assert "not finite" in run.rejections[0][1].reason


def test_a_summary_that_is_no_table_is_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "summary.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"damaged and cannot be read: summary\.json must contain a table of results"):
        read_run(tmp_path)


def test_damaged_records_are_refused_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{]\n")
    with pytest.raises(ConfigError, match="are damaged and cannot be read"):
        read_run(tmp_path)


def test_a_run_without_a_readable_checkpoint_is_read_all_the_same(tmp_path: Path, comparison_folder: Path) -> None:
    lines = (comparison_folder / "fedavg" / "seed-0" / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(lines)
    (tmp_path / "checkpoint" / "round-000001").mkdir(parents=True)
    run = read_run(tmp_path)
    assert len(run.records) == 3
    assert run.versions == {}
