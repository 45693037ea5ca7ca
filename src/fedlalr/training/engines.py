"""Chooses the engine of a run."""

from __future__ import annotations

from collections.abc import Callable

from fedlalr.algorithms.checks import check_choice
from fedlalr.training.auto import candidates
from fedlalr.training.reference import ReferenceEngine
from fedlalr.training.stackable import CannotStack
from fedlalr.training.stacked import StackedEngine
from fedlalr.training.work import Engine, Training
from fedlalr.training.workers import WorkersEngine

ENGINES: dict[str, Callable[[Training], Engine]] = {
    "reference": ReferenceEngine,
    "stacked": StackedEngine,
    "workers": WorkersEngine,
}
"""Engines by name."""


def create_engine(name: str, training: Training, cohort: int) -> tuple[Engine, str]:
    """The engine to train with and the reason for it."""
    check_choice("engine", name, ("auto", *ENGINES))
    if name != "auto":
        return ENGINES[name](training), "asked for"
    refusals = ""
    for choice, reason in candidates(training, cohort):
        try:
            engine = ENGINES[choice](training)
        except CannotStack as refusal:
            refusals = f"the cohort cannot be stacked: {refusal}"
        else:
            return engine, refusals or reason
    raise AssertionError("the reference engine takes every job")
