"""Experiment tracking with TensorBoard and MLflow: observers that log what `metrics.jsonl` records.

Both come with the extra `track`. Use one as a context manager, so that it is also closed if the run fails:

    with TensorBoard("runs/mine/tensorboard") as tracker:
        fl.run(model, clients, algorithm, observers=[tracker])
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedlalr.common.named import check_known
from fedlalr.config.overrides import flat
from fedlalr.federation import Observer, Record, RunInfo

RUN_ID_FILE = "mlflow_run_id"
"""In a run directory: the id of the MLflow run that a resumed run continues."""
_BATCH = 100
"""The most parameters that MLflow accepts at once."""
_LONGEST = 500
"""The longest parameter that every MLflow server accepts, in characters."""


class TrackerMissing(ImportError):
    """The library that a tracker needs is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not installed; install it with: pip install 'fedlalr[track]'")


class Tracker(Observer):
    """Common base of trackers: closed once, whether the run ends, fails or is interrupted."""

    def close(self, status: str) -> None:
        """End the tracking with FINISHED, FAILED or KILLED; a second call does nothing."""

    def on_end(self, result: object) -> None:
        self.close("FINISHED")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close("FINISHED" if kind is None else "KILLED" if issubclass(kind, KeyboardInterrupt) else "FAILED")


class TensorBoard(Tracker):
    """Writes event files; view them with `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: str | Path, settings: Mapping[str, Any] | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TrackerMissing("TensorBoard") from error
        self.folder, self.settings = Path(folder), dict(settings or {})
        self._make_writer = SummaryWriter
        self._writer: Any = None

    def on_start(self, info: RunInfo) -> None:
        # rounds that a resumed run repeats replace the earlier ones
        self._writer = self._make_writer(str(self.folder), purge_step=info.first_round)
        rows = parameters_of(info, self.settings).items()
        table = "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
        self._writer.add_text("settings", table, info.first_round)

    def on_round(self, record: Record) -> None:
        for name, value in numbers_of(record).items():
            self._writer.add_scalar(name, value, record.round)
        self._writer.flush()

    def close(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class MLflow(Tracker):
    """Logs to an MLflow server or database: `uri`, or that of MLFLOW_TRACKING_URI.

    With a run directory the MLflow run's id is stored there, and a resumed run continues the same MLflow run.
    """

    def __init__(
        self,
        experiment: str = "fedlalr",
        name: str | None = None,
        uri: str | None = None,
        settings: Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise TrackerMissing("MLflow") from error
        self.experiment, self.name, self.settings = experiment, name, dict(settings or {})
        self.run_dir = Path(run_dir) if run_dir is not None else None
        self.run_id: str | None = None
        self._client: Any = MlflowClient(tracking_uri=uri)

    def on_start(self, info: RunInfo) -> None:
        file = self.run_dir / RUN_ID_FILE if self.run_dir is not None else None
        if info.first_round > 1 and file is not None and file.is_file():
            self.run_id = file.read_text(encoding="utf-8").strip()
            self._client.update_run(self.run_id, status="RUNNING")
            return
        self.run_id = self._client.create_run(self._experiment_id(), run_name=self.name).info.run_id
        self._log_parameters(parameters_of(info, self.settings))
        if file is not None:
            file.write_text(f"{self.run_id}\n", encoding="utf-8")

    def on_round(self, record: Record) -> None:
        from mlflow.entities import Metric

        now = round(1000 * time.time())
        metrics = [Metric(name, value, now, record.round) for name, value in numbers_of(record).items()]
        if self.run_id is not None:
            self._send(lambda: self._client.log_batch(self.run_id, metrics=metrics))

    def close(self, status: str) -> None:
        if self.run_id is not None:
            self._send(lambda: self._client.set_terminated(self.run_id, status))
            self.run_id = None

    def _send(self, call: Callable[[], object]) -> None:
        """If the server is lost during a run, tracking ends with a warning; the run continues."""
        from mlflow.exceptions import MlflowException

        try:
            call()
        except (MlflowException, OSError) as error:
            self.run_id = None
            warnings.warn(
                f"MLflow cannot be reached ({error}); the run continues without it, and metrics.jsonl has every round",
                RuntimeWarning,
                stacklevel=3,
            )

    def _experiment_id(self) -> str:
        known = self._client.get_experiment_by_name(self.experiment)
        return str(known.experiment_id if known is not None else self._client.create_experiment(self.experiment))

    def _log_parameters(self, parameters: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        entries = [Param(name, value[:_LONGEST]) for name, value in parameters.items()]
        for start in range(0, len(entries), _BATCH):
            self._client.log_batch(self.run_id, params=entries[start : start + _BATCH])


def numbers_of(record: Record) -> dict[str, float]:
    """The finite ones of `record.numbers()`, without the round."""
    numbers = record.numbers()
    del numbers["round"]
    return {name: float(value) for name, value in numbers.items() if value is not None and math.isfinite(value)}


def parameters_of(info: RunInfo, settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings by dotted names, with the choices that the run made itself."""
    chosen = {"chosen.engine": info.engine, "chosen.device": info.device, "chosen.parameters": info.parameters}
    return {name: _text(value) for name, value in {**flat(settings), **chosen}.items()}


def create_tracker(name: str, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> Tracker:
    """Create a tracker by name, for a run in a directory."""
    trackers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(run_dir / "tensorboard", settings),
        "mlflow": lambda: MLflow(name=run_name, settings=settings, run_dir=run_dir),
    }
    check_known("there is no tracker", name, trackers)
    return trackers[name]()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
