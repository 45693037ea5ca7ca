"""The recorded runs of a figure, as arrays over seeds and rounds, and as a table in a file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedlalr.config import Config
from fedlalr.config.jobs import Job, ended
from fedlalr.data.sources import SOURCES
from fedlalr.federation.trajectory import TRAJECTORY_FILE, TrajectoryPoint, read_trajectory
from fedlalr.paper.plans import HOW_RUN, FigureLine, FigurePlan, Panel
from fedlalr.paper.style import write_table
from fedlalr.report.comparison import Curve

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """One line over its seeds, as arrays `[S, T]`; rounds that a run did not reach are NaN."""

    label: str
    seeds: tuple[int, ...]
    accuracy: Array
    loss: Array
    """On the test set."""
    train_loss: Array
    uploaded: Array
    """Bytes that all clients have sent so far, including buffers."""
    failures: tuple[str | None, ...] = ()
    """Why a run failed, per seed."""
    passes: float = math.nan
    """Passes over the training data per round."""
    trajectories: tuple[tuple[TrajectoryPoint, ...], ...] = ()
    """The recorded local steps, per seed."""

    @property
    def rounds(self) -> int:
        return int(self.accuracy.shape[1])


@dataclass(frozen=True)
class PanelCurves:
    """The lines of a panel for which there are runs."""

    panel: Panel
    lines: Mapping[str, Curves]


def collect(plan: FigurePlan, jobs: Collection[Job], folder: Path, seeds: int) -> list[PanelCurves]:
    """The curves of a plan, from its finished jobs."""
    ready = {job.folder for job in jobs}
    results = []
    for panel in plan.panels:
        lines = {}
        for line in panel.lines:
            mine = [line.job(folder / panel.key, seed) for seed in range(seeds)]
            if any(job.folder in ready for job in mine):
                lines[line.key] = _curves(line, [job for job in mine if job.folder in ready])
        results.append(PanelCurves(panel, lines))
    return results


def over(job: Job) -> bool:
    """Whether the folder has this run, on whatever device, to its end: finished, or failed in a round."""
    if ended(job) is None:
        return False
    try:
        return _what(job.directory.config()) == _what(job.config)
    except ValueError:  # a configuration that this version cannot read
        return False


def stack(values: Iterable[Sequence[float]], rounds: int) -> Array:
    """Lists of up to `rounds` numbers as rows of one array, NaN after their end and where they are not finite.

    >>> stack([[1, math.inf], [2]], 2).tolist()
    [[1.0, nan], [2.0, nan]]
    """
    rows = [[*row, *[math.nan] * (rounds - len(row))] for row in values]
    found = np.array(rows, dtype=float).reshape(-1, rounds)
    return np.where(np.isfinite(found), found, math.nan)


def passes_per_round(config: Config) -> float:
    """Passes over the training data per round; NaN if the number of local steps varies.

    >>> from fedlalr.config import load
    >>> passes_per_round(load("cifar10"))
    2.5
    """
    population = config.partition.clients or 1
    cohort: int = config.clients_per_round or population
    if config.local.epochs is not None:
        return cohort * config.local.epochs / population
    if config.local.steps is None or config.batch_size is None:
        return math.nan
    samples = SOURCES[config.data.name].train * (1 - config.data.validation)
    return cohort * config.local.steps * int(config.batch_size * config.accumulate) / samples


def write_curves(results: Sequence[PanelCurves], path: Path) -> Path:
    """A row for every panel, curve, seed and round; a curve shown in several panels is written once."""
    columns = ("panel", "line", "seed", "round", "accuracy", "test_loss", "train_loss", "passes", "uploaded")
    every = {(result.panel.key, key): curves for result in results for key, curves in result.lines.items()}
    rows = []
    for (panel, key), curves in every.items():
        for row, seed in enumerate(curves.seeds):
            for t in range(curves.rounds):
                values = [_plain(a[row, t]) for a in (curves.accuracy, curves.loss, curves.train_loss)]
                if any(values):
                    passes, sent = _plain(curves.passes * (t + 1)), f"{curves.uploaded[row, t]:.0f}"
                    rows.append([panel, key, seed, t + 1, *values, passes, sent])
    return write_table(path, columns, rows)


def write_trajectories(results: Sequence[PanelCurves], path: Path) -> Path:
    """A row for every recorded local step."""
    points = [
        (result.panel.key, seed, point)
        for result in results
        for curves in result.lines.values()
        for seed, followed in zip(curves.seeds, curves.trajectories, strict=True)
        for point in followed
    ]
    columns = ("panel", "seed", "round", "client", "step", *(points[0][2].values if points else ()))
    rows = [(key, seed, point.round, point.client, point.step, *point.values.values()) for key, seed, point in points]
    return write_table(path, columns, rows)


def _curves(line: FigureLine, jobs: Sequence[Job]) -> Curves:
    records = [job.directory.records() for job in jobs]
    rounds = line.config.rounds
    return Curves(
        label=line.label,
        seeds=tuple(job.config.seed for job in jobs),
        accuracy=stack([Curve(run).accuracies for run in records], rounds),
        loss=stack([[record.loss for record in run] for run in records], rounds),
        train_loss=stack([[record.train_loss for record in run] for run in records], rounds),
        uploaded=stack([list(accumulate(record.bytes_up for record in run)) for run in records], rounds),
        failures=tuple((job.directory.summary() or {}).get("failure") for job in jobs),
        passes=passes_per_round(line.config),
        trajectories=tuple(tuple(read_trajectory(job.folder / TRAJECTORY_FILE)) for job in jobs),
    )


def _what(config: Config) -> dict[str, object]:
    """The settings of a run without those of how it was computed.

    The limit on replies is left out, too: its default has changed since the first runs. Another value given by the user
    is in the folder's name.
    """
    return {name: value for name, value in config.problem().items() if name not in (*HOW_RUN, "max_norm_ratio")}


def _plain(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"
