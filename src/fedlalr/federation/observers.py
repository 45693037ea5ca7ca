"""How others look on while a run goes: progress displays, trackers, recorders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedlalr.training.work import Probe, Trace

if TYPE_CHECKING:
    from fedlalr.federation.metrics import Record
    from fedlalr.federation.run import Result


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
    """1, or where a resumed run goes on."""
    population: int
    clients_per_round: int
    parameters: int
    slots: tuple[str, ...] = ()
    """What a client has in its local steps; nothing where that happens elsewhere."""


class Observer:
    """Does nothing; override what you want to see."""

    def on_start(self, info: RunInfo) -> None:
        """Before the first round."""

    def probe(self, round: int) -> Probe | None:
        """A probe of this round's local steps, if any is wanted. At most one observer may want one in a round."""
        return None

    def include(self, round: int) -> Sequence[int]:
        """Clients that must be in the cohort of this round, in place of sampled ones."""
        return ()

    def on_traces(self, round: int, lr: float, traces: Sequence[Trace]) -> None:
        """What the probe of a round measured."""

    def on_round(self, record: Record) -> None:
        """After every round."""

    def on_end(self, result: Result) -> None:
        """After the last round."""
