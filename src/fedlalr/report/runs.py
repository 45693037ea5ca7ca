"""Runs as a report reads them from their directories, whether started from the command line or from Python."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlalr.config import Config, ConfigError, RunDirectory
from fedlalr.config.loading import CONFIG_FILE
from fedlalr.federation import Record, Rejection
from fedlalr.federation.storage.checkpoint import CheckpointError, read_description
from fedlalr.federation.storage.journal import CHECKPOINTS, METRICS_FILE
from fedlalr.federation.trajectory import TRAJECTORY_FILE, TrajectoryPoint, read_trajectory

TUNING = "grid"
"""The folder of a comparison's tuning runs, which are not reported."""
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


@dataclass(frozen=True)
class ReportedRun:
    """The content of one run directory."""

    path: Path
    records: Sequence[Record]
    config: Config | None = None
    """None if the run was started from Python, which writes no configuration."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Empty while the run is in progress, and for a run started from Python."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The settings in the last checkpoint that the result depends on."""
    versions: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Any] = field(default_factory=dict)
    """Choices that were left to the library, such as the engine."""
    trajectory: Sequence[TrajectoryPoint] = ()

    @property
    def seed(self) -> int | None:
        seed = self.config.seed if self.config else self.facts.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def seed_text(self) -> str:
        return "–" if self.seed is None else str(self.seed)

    @property
    def failure(self) -> str | None:
        failure = self.summary.get("failure")
        return None if failure is None else str(failure)

    @property
    def state(self) -> str:
        """How the run ended, as far as the directory shows."""
        if "status" in self.summary:
            return str(self.summary["status"])
        if self.config is None:
            return "started from Python"
        return "finished" if len(self.records) >= self.config.rounds else "running or interrupted"

    @property
    def rejections(self) -> list[tuple[int, Rejection]]:
        """Every rejected reply with its round, including those of a failed round, which has no record."""
        recorded = [(record.round, rejection) for record in self.records for rejection in record.rejected]
        last = [Rejection(**rejection) for rejection in self.summary.get("rejected_at_failure", ())]
        return recorded + [(len(self.records) + 1, rejection) for rejection in last]


def find_runs(places: Iterable[str | Path], *, tuning: bool = False) -> list[Path]:
    """The run directories at and below some paths, each once; the tuning runs of a comparison only if required.

    Raises `ConfigError` for a path without any.
    """
    found: dict[Path, None] = {}
    for place in map(Path, places):
        runs = runs_below(place, tuning)
        if not runs:
            raise ConfigError(
                f"{place} contains no run: there is no {METRICS_FILE} in or below it. Give the directory of a run "
                f"(fedlalr run --run-dir DIR) or of a comparison (fedlalr compare --run-dir DIR)"
            )
        found |= dict.fromkeys(runs)
    return list(found)


def runs_below(place: Path, tuning: bool = False) -> list[Path]:
    """The run directories at and below a path, which may have none, or not exist yet."""
    if (place / METRICS_FILE).is_file():
        return [place]
    found = []
    for folder, inner, files in os.walk(place):  # ignores folders that are removed meanwhile
        inner[:] = [name for name in inner if name != CHECKPOINTS and (tuning or name != TUNING)]
        if METRICS_FILE in files:
            found.append(Path(folder))
    return sorted(found, key=_by_numbers)


def _by_numbers(path: Path) -> list[list[str | float]]:
    """A key that sorts the numbers in names as numbers.

    >>> sorted([Path("lr=1e-2"), Path("lr=0.5"), Path("lr=15"), Path("lr=5")], key=_by_numbers)[1:]
    [PosixPath('lr=0.5'), PosixPath('lr=5'), PosixPath('lr=15')]
    """
    split = [_NUMBER.split(part) for part in path.parts]  # words and numbers alternate
    return [[float(piece) if i % 2 else piece for i, piece in enumerate(pieces)] for pieces in split]


def read_run(path: Path) -> ReportedRun:
    """Read everything in a run directory. A damaged file raises a `ConfigError` that names it."""
    directory = RunDirectory(path)
    try:
        records = directory.records()
        summary = directory.summary() or {}
        trajectory = read_trajectory(path / TRAJECTORY_FILE)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"the records in {path} are damaged and cannot be read: {error}") from error
    description = _description(path)
    return ReportedRun(
        path=path,
        records=records,
        config=directory.config() if (path / CONFIG_FILE).is_file() else None,
        summary=summary,
        facts=description.get("facts", {}),
        versions=description.get("versions", {}),
        choices=description.get("choices", {}),
        trajectory=trajectory,
    )


def _description(path: Path) -> Mapping[str, Any]:
    """From the newest readable checkpoint; empty without one, since a report needs no checkpoint."""
    for place in sorted((path / CHECKPOINTS).glob("round-*"), reverse=True):
        try:
            return read_description(place)
        except CheckpointError:
            continue
    return {}
