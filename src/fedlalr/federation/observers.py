"""Callbacks of a run: progress displays, trackers, recorders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from fedlalr.common.named import nearest
from fedlalr.training.interfaces import Probe, Trace

if TYPE_CHECKING:
    from fedlalr.federation.record import Record
    from fedlalr.federation.result import Result


@dataclass(frozen=True)
class RunInfo:
    """What is known when a run starts."""

    algorithm: str
    engine: str
    reason: str
    """Why that engine."""
    device: str
    rounds: int
    first_round: int
    """1, or the round from which a run resumes."""
    population: int
    clients_per_round: int
    parameters: int
    slots: tuple[str, ...] = ()
    """The slots of a client in its local steps; empty if clients train elsewhere."""
    history: tuple[Record, ...] = field(default=(), repr=False)
    """The records of the rounds before the first one, if the run resumes."""
    seconds: float | None = None
    """Estimated duration of all rounds, from one local step; only for large networks on a CPU with `engine="auto"`."""
    accuracy_every: int = 1
    """Rounds between two values of the accuracy, or of the loss that replaces it: more than 1 if only the clients are
    evaluated."""


class Stop(Exception):
    """Raise this in an observer to end the run after the current round; files are written and `run` returns. Raised in
    `on_start`, it ends the run before its first round."""


_CALLED = ("on_start", "on_traces", "on_model", "on_round", "on_end")


class Observer:
    """Does nothing by default; override the events you need."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Reject a method with a misspelt name, which would never be called."""
        super().__init_subclass__(**options)
        for name in vars(cls):
            near = nearest(name, _CALLED, cutoff=0.8) if name.startswith("on_") else None
            if near and name not in _CALLED:
                raise TypeError(f"{cls.__name__}.{name} would never be called; did you mean {near}?")

    def on_start(self, info: RunInfo) -> None:
        """Before the first round."""

    def probe(self, round: int) -> Probe | None:
        """A probe of this round's local steps, or None. At most one observer may return one in a round."""
        return None

    def include(self, round: int) -> Sequence[int]:
        """Clients that must be in the cohort of this round, in place of sampled ones."""
        return ()

    def on_traces(self, round: int, lr: float, traces: Sequence[Trace]) -> None:
        """What the probe of a round measured."""

    def on_model(self, round: int, model: Callable[[], nn.Module]) -> None:
        """After every round: call `model()` for a copy of the current module."""

    def on_round(self, record: Record) -> None:
        """After every round. Raise `Stop` to end the run there."""

    def on_end(self, result: Result) -> None:
        """After the last round."""


def stopped_by(observers: Sequence[Observer], event: Callable[[Observer], None]) -> bool:
    """Pass an event to all observers; returns whether one of them raised `Stop`."""
    stopped = False
    for observer in observers:
        try:
            event(observer)
        except Stop:
            stopped = True
    return stopped
