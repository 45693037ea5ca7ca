"""Trackers, read back with the trackers' own readers."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedlalr as fl
from fedlalr.cli import app
from fedlalr.federation import RunInfo
from fedlalr.federation.record import Distribution
from fedlalr.report.trackers import (
    MLflow,
    TensorBoard,
    Tracker,
    TrackerMissing,
    create_tracker,
    numbers_of,
)
from report.curves import curve


def run(tracker: Tracker, rounds: int = 3, run_dir: Path | None = None, resume: bool = False) -> fl.Result:
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(8, 3, generator=generator), torch.randint(0, 2, (8,), generator=generator)) for _ in range(3)
    ]
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    with tracker:
        return fl.run(
            model,
            clients,
            fl.FedAvg(lr=0.1),
            rounds=rounds,
            engine="reference",
            observers=[tracker],
            run_dir=run_dir,
            resume=resume,
        )


def scalars(folder: Path, name: str) -> Sequence[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_gets_every_number_of_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    result = run(TensorBoard(tmp_path, {"algorithm": {"lr": 0.1}}))
    for name in ("loss", "train_loss", "bytes_up", "clients", "rejected", "seconds", "timing/train"):
        wanted = [(record.round, numbers_of(record)[name]) for record in result.history]
        assert scalars(tmp_path, name) == [(step, pytest.approx(value)) for step, value in wanted]


def test_tensorboard_shows_a_resumed_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run(TensorBoard(tmp_path / "events"), rounds=2, run_dir=tmp_path / "run")
    run(TensorBoard(tmp_path / "events"), rounds=4, run_dir=tmp_path / "run", resume=True)
    assert [step for step, _ in scalars(tmp_path / "events", "loss")] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow takes a second to create one, so every test gets a copy."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    pytest.importorskip("alembic")
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def database(tmp_path: Path, empty_database: Path) -> str:
    return f"sqlite:///{shutil.copy(empty_database, tmp_path / 'mlflow.db')}"


def test_mlflow_gets_settings_numbers_and_the_end(tmp_path: Path, database: str) -> None:
    from mlflow import MlflowClient

    tracker = MLflow("mine", name="first", uri=database, settings={"algorithm": {"lr": 0.1}}, run_dir=tmp_path)
    result = run(tracker)
    client = MlflowClient(tracking_uri=database)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert logged.info.run_name == "first"
    assert logged.data.params["algorithm.lr"] == "0.1"
    assert logged.data.params["chosen.engine"] == "reference"
    history = client.get_metric_history(logged.info.run_id, "train_loss")
    assert [(metric.step, metric.value) for metric in history] == [
        (record.round, pytest.approx(record.train_loss)) for record in result.history
    ]


def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, database: str) -> None:
    from mlflow import MlflowClient

    run(MLflow(uri=database, run_dir=tmp_path), rounds=2, run_dir=tmp_path)
    run(MLflow(uri=database, run_dir=tmp_path), rounds=3, run_dir=tmp_path, resume=True)
    client = MlflowClient(tracking_uri=database)
    experiment = client.get_experiment_by_name("fedlalr")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(logged.info.run_id, "loss")
    assert [metric.step for metric in history] == [1, 2, 3]


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, "KILLED"), (RuntimeError, "FAILED")])
def test_mlflow_learns_how_a_run_broke_off(database: str, error: type[BaseException], status: str) -> None:
    from mlflow import MlflowClient

    class Breaking(MLflow):
        def on_round(self, record: fl.Record) -> None:
            raise error

    with pytest.raises(error):
        run(Breaking(uri=database))
    client = MlflowClient(tracking_uri=database)
    experiment = client.get_experiment_by_name("fedlalr")
    assert experiment is not None
    assert [logged.info.status for logged in client.search_runs([experiment.experiment_id])] == [status]


def test_a_server_that_is_lost_ends_the_tracking_and_not_the_run(database: str) -> None:
    from mlflow.exceptions import MlflowException

    class Lost:
        def log_batch(self, run_id: str, **_: object) -> None:
            raise MlflowException("gone")

    class Losing(MLflow):
        def on_start(self, info: RunInfo) -> None:
            super().on_start(info)
            self._client = Lost()

    with pytest.warns(RuntimeWarning, match="MLflow cannot be reached .gone.; the run continues"):
        assert len(run(Losing(uri=database)).history) == 3


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(name, name), None)
    with pytest.raises(TrackerMissing, match=r"is not installed; install it with: pip install 'fedlalr\[track\]'"):
        create_tracker(name, tmp_path, "run", {})


def test_an_unknown_tracker_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"choose one of tensorboard, mlflow. Did you mean 'tensorboard'\?"):
        create_tracker("tensorbord", tmp_path, "run", {})


def test_what_is_not_a_finite_number_is_left_out() -> None:
    (record,) = curve([None]).records
    assert "accuracy" not in numbers_of(record)
    assert "round" not in numbers_of(record)
    assert numbers_of(record)["rejected"] == 0


def test_measures_are_tracked_under_their_names() -> None:
    (record,) = curve([0.5]).records
    measured = numbers_of(replace(record, metrics={"auc": 0.75, "none": math.nan}))
    assert {name: value for name, value in measured.items() if name.startswith("metrics")} == {"metrics/auc": 0.75}


def test_the_quality_over_the_clients_is_tracked() -> None:
    (record,) = curve([0.5]).records
    over = numbers_of(replace(record, per_client={"accuracy": Distribution(0.75, math.nan, 0.5, 20)}))
    assert {name: value for name, value in over.items() if name.startswith("per_client")} == {
        "per_client/accuracy/mean": 0.75,
        "per_client/accuracy/worst": 0.5,
        "per_client/accuracy/clients": 20,
    }


def test_the_command_line_tracks_a_run_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ("rounds=1", "partition.clients=12", "clients_per_round=2", "local.steps=1", "engine=reference")
    arguments = ["run", "quickstart", *small, "--run-dir", str(tmp_path / "run"), "--quiet", "--track", "tensorboard"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch.utils.tensorboard", None)
        refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "fedlalr[track]" in refused.output
    pytest.importorskip("tensorboard")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert [step for step, _ in scalars(tmp_path / "run" / "tensorboard", "accuracy")] == [1]
    resumed = CliRunner().invoke(
        app, ["resume", str(tmp_path / "run"), "rounds=2", "--quiet", "--track", "tensorboard"]
    )
    assert resumed.exit_code == 0, resumed.output
    assert [step for step, _ in scalars(tmp_path / "run" / "tensorboard", "accuracy")] == [1, 2]
