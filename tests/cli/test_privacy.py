"""`fedlalr privacy` on real runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import fedlalr as fl
from fedlalr.cli import app
from fedlalr.federation.privacy import accounting
from fedlalr.federation.privacy.accounting import Spent, composed_epsilon, epsilon, solve_noise_multiplier

CLIENTS = [(torch.ones(2, 3), torch.tensor([0, 1])) for _ in range(10)]


def private(folder: Path, clients: int = 10, **privacy: float) -> fl.Result:
    """A tiny run, with privacy if it is given."""
    return fl.run(
        torch.nn.Linear(3, 2),
        CLIENTS[:clients],
        fl.FedAvg(),
        rounds=3,
        clients_per_round=2,
        local=fl.Steps(1),
        run_dir=folder,
        privacy=fl.Privacy(clip=1.0, **privacy) if privacy else None,
    )


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["privacy", *map(str, arguments)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them for tuning, in one directory."""
    folder = tmp_path_factory.mktemp("runs")
    private(folder / "first", noise_multiplier=1.0, delta=1e-3)
    private(folder / "grid" / "second", epsilon=4.0, delta=1e-4)
    return folder


def test_runs_are_composed_with_their_tuning_at_the_smallest_delta(runs: Path) -> None:
    solved = solve_noise_multiplier(4.0, 0.2, 3, 1e-4)
    shown = json.loads(cli(runs, "--json").stdout)
    assert shown["delta"] == 1e-4
    assert [(Path(run["run"]).name, run["noise_multiplier"], run["rate"], run["rounds"]) for run in shown["runs"]] == [
        ("first", 1.0, 0.2, 3),
        ("second", solved, 0.2, 3),
    ]
    assert [run["epsilon"] for run in shown["runs"]] == [epsilon(1.0, 0.2, 3, 1e-4), epsilon(solved, 0.2, 3, 1e-4)]
    assert shown["epsilon"] == composed_epsilon([Spent(1.0, 0.2, 3), Spent(solved, 0.2, 3)], 1e-4)


def test_the_epsilon_of_a_run_is_that_of_its_last_record(tmp_path: Path) -> None:
    result = private(tmp_path / "run", noise_multiplier=1.0, delta=1e-3)
    assert json.loads(cli(tmp_path / "run", "--json").stdout)["epsilon"] == result.history[-1].epsilon


def test_the_table_has_every_run_and_their_total(runs: Path) -> None:
    lines = cli(runs / "first", runs / "grid" / "second", "--delta", 1e-5).stdout.splitlines()
    assert lines[1].split()[-5:] == ["ε", "at", "δ", "=", "1e-05"]
    assert lines[3].split()[1:] == ["3", "0.2", "1", f"{epsilon(1.0, 0.2, 3, 1e-5):.3f}"]
    assert lines[5].split()[:2] == ["together", "6"]
    assert "different data" not in cli(runs).stdout


def test_a_round_that_has_a_checkpoint_but_no_record_counts(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "first", tmp_path / "killed")
    metrics = tmp_path / "killed" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
    assert json.loads(cli(tmp_path / "killed", "--json").stdout)["runs"][0]["rounds"] == 3


def test_runs_with_different_data_are_announced(runs: Path, tmp_path: Path) -> None:
    private(tmp_path / "other", clients=5, noise_multiplier=1.0, delta=1e-3)
    assert "The runs have different data" in cli(runs / "first", tmp_path / "other").stdout


def test_what_cannot_be_accounted_for_is_rejected(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private(tmp_path / "plain")
    rejected = {cli(runs, tmp_path / "plain"): f"{tmp_path / 'plain'} was trained without privacy"}
    shutil.rmtree(tmp_path / "plain" / "checkpoint")
    rejected[cli(tmp_path / "plain")] = f"{tmp_path / 'plain'} has no checkpoint that can be read"
    private(tmp_path / "no delta", noise_multiplier=1.0)
    rejected[cli(tmp_path / "no delta")] = "the runs have no delta; choose one with --delta"
    rejected[cli(runs, "--delta", 2)] = "delta must be at least 1e-10 and below 1, not 2.0"
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    accounting._one_round.cache_clear()
    rejected[cli(runs, "--delta", 0.0123)] = "pip install 'fedlalr[privacy]'"
    for result, message in rejected.items():
        assert result.exit_code == 2, result.output
        assert message in result.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{clip: 1.0, noise_multiplier: 1.0, delta: 1e-12}", "delta must be at least 1e-10"),
        ("{clip: 1.0, noise_multiplier: 1.0, delta: 1e-3}", "pip install 'fedlalr[privacy]'"),
        ("{clip: 1.0, epsilon: 4.0, delta: 1e-3}", "pip install 'fedlalr[privacy]'"),
    ],
)
def test_a_run_that_cannot_be_accounted_for_does_not_start(
    settings: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    accounting._one_round.cache_clear()
    accounting._composed_epsilon.cache_clear()
    words = ["run", "quickstart", "algorithm=fedavg", f"privacy={settings}", "--run-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not (tmp_path / "run").exists()
