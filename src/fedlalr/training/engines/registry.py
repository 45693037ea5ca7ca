"""The engines by name, and the choice of one for a run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedlalr.common.checks import check_choice
from fedlalr.common.named import check_known
from fedlalr.training.engines.auto import MOST_SHIPPED, candidates
from fedlalr.training.engines.distributed import INNER, DistributedEngine
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.engines.workers import CannotShip, WorkersEngine
from fedlalr.training.interfaces import Engine, Training
from fedlalr.training.machine import memory
from fedlalr.training.stacked.engine import StackedEngine
from fedlalr.training.stacked.trial import CannotStack

ENGINES: dict[str, Callable[..., Engine]] = {
    "reference": ReferenceEngine,
    "stacked": StackedEngine,
    "workers": WorkersEngine,
    "distributed": DistributedEngine,
}
"""Engines by name."""
MOST_WORKERS = 1024
"""Each worker is a process that imports torch."""


def create_engine(name: str, training: Training, cohort: int) -> tuple[Engine, str]:
    """The engine to train with and the reason for choosing it."""
    kind, option = check_engine(name)
    some = torch.arange(min(len(training.clients), 1000), device="cpu")
    training.steps(1, some)  # rejects a user's interval that returns something invalid
    if kind == "workers":
        return WorkersEngine(training, int(option) if option else None), "requested"
    if kind == "distributed":
        distributed = DistributedEngine(training, option or "auto")
        return distributed, distributed.reason
    if kind != "auto":
        try:
            return ENGINES[kind](training), "requested"
        except CannotStack as error:
            raise CannotStack(f"engine={name!r} cannot train this job: {error}. Use engine='auto'.") from error
    why_not = ""
    for choice, reason in candidates(training, cohort):
        try:
            limits = {"most": memory() * MOST_SHIPPED} if choice == "workers" else {}
            engine = ENGINES[choice](training, **limits)
        except CannotStack as error:
            why_not = f"the cohort cannot be stacked: {error}"
        except CannotShip as error:
            why_not = str(error)
        else:
            return engine, why_not or reason
    raise AssertionError("the reference engine takes every job")


def check_engine(name: str) -> tuple[str, str]:
    """Split a name into the engine and its option: the number of processes in `workers:3`, or the engine inside each
    rank in `distributed:stacked`."""
    kind, colon, option = name.partition(":")
    check_known("there is no engine", kind, ("auto", *ENGINES))
    if not colon:
        return kind, ""
    if kind == "workers":
        if not (option.isascii() and option.isdigit() and 1 <= int(option[:20]) <= MOST_WORKERS):
            raise ValueError(f"engine {name!r}: the number of workers must be a whole number from 1 to {MOST_WORKERS}")
    elif kind == "distributed":
        check_choice(f"the engine inside {kind}", option, INNER)
    else:
        raise ValueError(f"engine {name!r}: {kind} takes no option; write engine={kind!r}")
    return kind, option
