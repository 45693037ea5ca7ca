"""Chooses the engine of a run."""

from __future__ import annotations

from collections.abc import Callable

from fedlalr.algorithms.checks import check_choice
from fedlalr.training.reference import ReferenceEngine
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
    if name == "auto":
        return ReferenceEngine(training), "the only engine"
    return ENGINES[name](training), "asked for"
