"""The files that a configuration adds to a run directory: `config.yaml` at the start and `summary.json` at the end.

The run itself writes `metrics.jsonl` and `checkpoint/`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlalr.common.files import write_whole
from fedlalr.common.reading import open_file, whole_lines
from fedlalr.config.errors import ConfigError
from fedlalr.config.loading import CONFIG_FILE, dump, load
from fedlalr.config.schema import Config
from fedlalr.federation import Record, Rejection, RunInfo
from fedlalr.federation.storage.journal import CHECKPOINTS, METRICS_FILE, clear_run, explained, versions
from fedlalr.federation.trajectory import TRAJECTORY_FILE
from fedlalr.training.machine import hardware

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"
LARGEST_SUMMARY = 1 << 26
"""Bytes."""

Summary = dict[str, Any]


class RunDirectory:
    """Reads and writes the files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def holds_run(self) -> bool:
        """Whether the directory contains a run with at least one record or checkpoint."""
        metrics = self.path / METRICS_FILE
        recorded = metrics.is_file() and metrics.stat().st_size > 0
        return recorded or any((self.path / CHECKPOINTS).glob("round-*"))

    def clear(self) -> None:
        """Remove the run, and nothing else."""
        clear_run(self.path, also=(REPORT_FILE, SUMMARY_FILE, TRAJECTORY_FILE, CONFIG_FILE))

    def check_free(self) -> None:
        """Reject a directory that contains a run."""
        if self.holds_run:
            raise ConfigError(
                f"{self.path} already contains a run; resume it with `fedlalr resume {shlex.quote(str(self.path))}`, "
                f"choose another --run-dir, or pass --overwrite to start from scratch"
            )

    def config(self) -> Config:
        return load(self.path / CONFIG_FILE)

    def write_config(self, config: Config) -> None:
        self._write(CONFIG_FILE, dump(config))
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)

    def records(self) -> list[Record]:
        """The records so far, without a last line that is still being written."""
        file = self.path / METRICS_FILE
        if not file.is_file():
            return []
        with open_file(file) as content:
            return [Record.from_json(line.decode()) for line in whole_lines(content)]

    def summary(self) -> Summary | None:
        """The summary, or None if the run has not ended."""
        file = self.path / SUMMARY_FILE
        if not file.is_file():
            return None
        if file.stat().st_size > LARGEST_SUMMARY:
            raise ValueError(f"{SUMMARY_FILE} is larger than {LARGEST_SUMMARY:,} bytes, and cannot be a summary")
        summary: Summary = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError(f"{SUMMARY_FILE} must contain a table of results")
        return summary

    def write_summary(self, summary: Summary) -> None:
        """Write the summary, which marks the end of the run."""
        self._write(SUMMARY_FILE, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")

    def _write(self, name: str, text: str) -> None:
        advice = "; fix the problem, then start or resume the run again"
        with explained(f"{self.path / name} cannot be written", advice):
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(self.path / name, text)


def summarise(
    config: Config, info: RunInfo, records: list[Record], failure: str | None = None, rejected: Sequence[Rejection] = ()
) -> Summary:
    """The summary of a run. `rejected` are the replies rejected in a failed round, which has no record."""
    accuracies = [record.accuracy for record in records if record.accuracy is not None]
    plain = records[-1].as_dict() if records else {}
    last = {name: None if isinstance(value, str) else value for name, value in plain.items()}  # an infinity
    return {
        "status": "failed" if failure else "finished" if len(records) == config.rounds else "interrupted",
        "failure": failure,
        "name": config.name,
        "data": config.data.name,
        "algorithm": config.algorithm.model_dump(),
        "seed": config.seed,
        "rounds": len(records),
        "accuracy": last.get("accuracy"),
        "best_accuracy": max(accuracies, default=None),
        "loss": last.get("loss"),
        "train_loss": last.get("train_loss"),
        "per_client": last.get("per_client", {}),
        "epsilon": last.get("epsilon"),
        "bytes_up": sum(record.bytes_up for record in records),
        "bytes_down": sum(record.bytes_down for record in records),
        "seconds": sum(record.seconds for record in records),
        "rejected": sum(len(record.rejected) for record in records) + len(rejected),
        "rejected_at_failure": [rejection._asdict() for rejection in rejected],
        "engine": info.engine,
        "device": info.device,
        "hardware": hardware(info.device),
        "versions": versions(),
        "parameters": info.parameters,
        "clients": info.population,
    }
