"""Trajectories: the second moments and learning rates of chosen clients over their local steps.

    ‖v̂‖²                     grows within a round; how fast differs from client to client
    quantiles of α/√v̂        the effective learning rates of all coordinates

In a run directory, each step is a line of `trajectory.jsonl`. Rounds and clients that are not chosen cost nothing.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.files import write_whole
from fedlalr.common.reading import open_file, whole_lines
from fedlalr.federation.observers import Observer, RunInfo
from fedlalr.federation.storage.journal import RunDirectoryError, explained
from fedlalr.training.interfaces import Probe, Trace

TRAJECTORY_FILE = "trajectory.jsonl"
V_HAT_SQUARED = "‖v̂‖²"
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def rate_name(quantile: float) -> str:
    """
    >>> rate_name(0.05)
    'α/√v̂, 5 %'
    """
    return f"α/√v̂, {100 * quantile:g} %"


class TrajectoryPoint(NamedTuple):
    """What was measured of one client after one local step."""

    round: int
    client: int
    step: int
    """From 1."""
    values: dict[str, float]


@dataclass
class MomentProbe:
    """Measures ‖v̂‖² and the quantiles of α/√v̂ of a client."""

    clients: frozenset[int]

    def measure(self, state: Slots, context: Context) -> dict[str, float]:
        v_hat = state.v_hat
        ascending = v_hat.sort().values  # torch.quantile does not take more than 16 million coordinates
        # the rate falls with v̂, so its quantile q is the rate at v̂'s quantile 1 − q
        places = [round((1 - quantile) * (len(ascending) - 1)) for quantile in QUANTILES]
        squares = v_hat.double().square().sum()
        rates = context.lr / ascending[places].double().sqrt()
        squared, *quantiles = torch.cat([squares[None], rates]).tolist()  # synchronises with the device only once
        return {V_HAT_SQUARED: squared} | {rate_name(q): rate for q, rate in zip(QUANTILES, quantiles, strict=True)}


class Trajectory(Observer):
    """Records the trajectories of some clients in some rounds (None: in all), in memory and, with a path, in a file.

    In these rounds the clients replace sampled ones in the cohort. A resumed run continues its file.
    """

    def __init__(
        self, clients: Collection[int], rounds: Collection[int] | None = None, path: str | Path | None = None
    ) -> None:
        self.clients = frozenset(map(operator.index, clients))
        self.rounds = None if rounds is None else frozenset(map(operator.index, rounds))
        if not self.clients or min(self.clients) < 0 or (self.rounds is not None and min(self.rounds, default=0) < 1):
            raise ValueError(
                f"a trajectory needs clients, numbered from 0, and rounds, numbered from 1, "
                f"not clients {list(clients)} and rounds {rounds if rounds is None else list(rounds)}"
            )
        self.path = Path(path) if path is not None else None
        self.points: list[TrajectoryPoint] = []

    def on_start(self, info: RunInfo) -> None:
        """Reject runs without such a trajectory; keep the points of rounds that a resumed run does not repeat."""
        if "v_hat" not in info.slots:
            raise TypeError(
                f"a trajectory records v̂, but the clients of {info.algorithm} have only {', '.join(info.slots)}; "
                f"use FedLALR"
            )
        if self.rounds is not None and max(self.rounds) > info.rounds:
            raise ValueError(
                f"a trajectory was requested for round {max(self.rounds)}, but the run has {info.rounds} rounds"
            )
        if self.path is not None and info.first_round > 1:
            try:
                self.points = read_trajectory(self.path)
            except (OSError, ValueError) as error:
                raise RunDirectoryError(f"{error}; restore it, or move it away to resume without it") from error
        self.points = [point for point in self.points if point.round < info.first_round]
        if self.path is not None:
            with explained(f"the trajectory {self.path} cannot be written"):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if self.points or self.path.exists():
                    write_whole(self.path, _lines(self.points))

    def probe(self, round: int) -> Probe | None:
        return MomentProbe(self.clients) if self._wants(round) else None

    def include(self, round: int) -> Sequence[int]:
        return sorted(self.clients) if self._wants(round) else ()

    def on_traces(self, round: int, lr: float, traces: Sequence[Trace]) -> None:
        if not self._wants(round):  # another observer's probe
            return
        new = [TrajectoryPoint(round, trace.client, trace.step, trace.values) for trace in traces]
        self.points += new
        if self.path is not None:
            with explained(f"the trajectory {self.path} cannot be written"), self.path.open("ab") as file:
                file.write(_lines(new).encode())
                file.flush()
                os.fsync(file.fileno())  # this file must be on disk before the checkpoint of this round

    def _wants(self, round: int) -> bool:
        return self.rounds is None or round in self.rounds


def read_trajectory(path: str | Path) -> list[TrajectoryPoint]:
    """The points of a file; none if there is no file. An incomplete last line is ignored."""
    if not Path(path).is_file():
        return []
    try:
        with open_file(Path(path)) as file:
            return [TrajectoryPoint(**json.loads(line)) for line in whole_lines(file)]
    except (ValueError, TypeError) as error:
        raise ValueError(f"the trajectory {path} is damaged: {error}") from error


def _lines(points: Iterable[TrajectoryPoint]) -> str:
    return "".join(json.dumps(point._asdict(), ensure_ascii=False) + "\n" for point in points)
