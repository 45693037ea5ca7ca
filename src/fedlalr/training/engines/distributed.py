"""The distributed engine: splits the cohort over the processes that torchrun started.

Every rank holds the server's state and trains a contiguous part of the cohort, with about the same number of local
steps as the others. What the server needs to know about single clients (ids, losses and failures) is gathered; the
uploads stay on their rank and are reduced by all-reduce, see `Spread`. Inside a rank, another engine trains.

    torchrun --nproc-per-node 4 -m fedlalr run …
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from fedlalr.training.engines.auto import is_small_chain
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Buffers, Engine, Replies, Training, Work
from fedlalr.training.ranks import ALONE, Ranks, Spread, join, started_by_torchrun
from fedlalr.training.stacked.engine import StackedEngine
from fedlalr.training.stacked.trial import CannotStack

Chosen = str | Callable[[Training], Engine]
"""An engine by name, or a function that creates one."""

INNER = ("auto", "reference", "stacked")
"""Engines that may train inside a rank."""


class DistributedEngine:
    """Trains this rank's part of the cohort."""

    name = "distributed"

    def __init__(self, training: Training, inner: str = "auto") -> None:
        self.training = training
        self.ranks = join(training.device)
        self.inner, how = _create_inner(inner, training)
        self.reason = f"{self.ranks.count} {'process' if self.ranks.count == 1 else 'processes'}, {how}"

    def train(self, work: Work) -> Replies:
        shares = shard(self.training.steps(work.round, work.clients), self.ranks.count)
        rows = torch.arange(len(work.clients), device="cpu")[shares[self.ranks.rank]]
        part = work.part(rows)
        mine = self.inner.train(part) if len(rows) else Replies.empty(part, self.training)
        small = (mine.clients, mine.samples, mine.steps, mine.losses.cpu(), mine.failures, mine.traces)
        clients, samples, steps, losses, failures, traces = zip(*self.ranks.gather_values(small), strict=True)
        return replace(
            mine,
            clients=torch.cat(clients),
            samples=torch.cat(samples),
            steps=torch.cat(steps),
            losses=torch.cat(losses),
            failures={client: error for theirs in failures for client, error in theirs.items()},
            traces=tuple(trace for theirs in traces for trace in theirs),
            spread=Spread(self.ranks, tuple(len(theirs) for theirs in clients)),
        )

    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        shares = shard(self.training.clients.sizes[clients], self.ranks.count)
        spread = Spread(self.ranks, tuple(share.stop - share.start for share in shares))
        mine = spread.mine(clients)
        if len(mine):
            parts = self.inner.recalibrate(x, buffers, mine, round)
        else:
            parts = {name: buffer.new_empty(0, *buffer.shape) for name, buffer in buffers.items()}
        return {name: spread.gather(part) for name, part in parts.items()}

    def close(self) -> None:
        self.inner.close()


def join_ranks(engine: Chosen, device: torch.device) -> tuple[Chosen, Ranks]:
    """The engine's name and the ranks of a run; under torchrun there are several.

    Any other engine would repeat the whole run in every process, so it is rejected under torchrun.
    """
    if not started_by_torchrun():
        return engine, ALONE
    if not isinstance(engine, str):
        return engine, join(device)
    kind = engine.partition(":")[0]
    if kind not in ("auto", "distributed"):
        raise ValueError(
            f"torchrun started several processes, and with engine={engine!r} each would do the whole run; use "
            f"engine='distributed' (or 'distributed:reference', 'distributed:stacked'), or start without torchrun"
        )
    return ("distributed" if kind == "auto" else engine), join(device)


def shard(costs: Tensor, count: int) -> list[slice]:
    """Split a sequence of integer costs into contiguous parts of about the same sum.

    >>> shard(torch.tensor([1, 1, 1, 1, 4]), 2)
    [slice(0, 4, None), slice(4, 5, None)]
    """
    middles = 2 * costs.cumsum(0) - costs
    owner = middles * count // (2 * costs.sum())
    bounds = torch.searchsorted(owner, torch.arange(count + 1, device="cpu")).tolist()
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _create_inner(name: str, training: Training) -> tuple[Engine, str]:
    """The engine inside a rank: stacked if `auto` would stack without ranks, else the reference engine."""
    alone = "each training one client after another"
    stacks = name == "stacked" or (name == "auto" and (training.device.type != "cpu" or is_small_chain(training)))
    if not stacks:
        return ReferenceEngine(training), alone
    try:
        return StackedEngine(training), "each training its part as a stack"
    except CannotStack as error:
        if name == "stacked":
            raise
        return ReferenceEngine(training), f"{alone}, because {error}"
