"""Comparison of methods: accuracy, rounds to a target, and cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from fedlalr.federation import Record
from fedlalr.federation.record import judged_losses
from fedlalr.report.statistics import ConfidenceInterval, MeanAndDeviation, paired_difference, spread

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class MethodOutcome:
    """One method over all seeds. Lists are in the order of the seeds; a failed run has no final accuracy."""

    method: str
    settings: Mapping[str, Any]
    finals: tuple[float | None, ...]
    """Accuracy after the last round."""
    rounds_to_target: tuple[int | None, ...]
    """The first round that reached the target; None if none did."""
    megabytes_to_target: tuple[float | None, ...]
    """Sent until then by all clients together, up and down, including buffers."""
    seconds_to_target: tuple[float | None, ...]
    """Until the end of that round."""
    megabytes: MeanAndDeviation
    """Sent over the whole run."""
    seconds: MeanAndDeviation
    failures: tuple[str | None, ...]
    to_best: ConfidenceInterval | None
    """Paired difference of the final accuracy to the best method's; None for the best itself and if a run failed."""

    @property
    def final(self) -> MeanAndDeviation | None:
        """Over the seeds that finished."""
        through = [final for final in self.finals if final is not None]
        return spread(through) if through else None

    @property
    def reached(self) -> int:
        """Seeds that reached the target."""
        return sum(rounds is not None for rounds in self.rounds_to_target)

    def as_dict(self) -> dict[str, Any]:
        plain = asdict(self)
        for name in ("final", "megabytes", "seconds", "to_best"):
            value = getattr(self, name)
            plain[name] = value._asdict() if value is not None else None
        return plain


@dataclass(frozen=True)
class Comparison:
    """All methods, best first."""

    outcomes: tuple[MethodOutcome, ...]
    target: float
    seeds: int

    @property
    def best(self) -> MethodOutcome:
        return self.outcomes[0]

    def as_dict(self) -> dict[str, Any]:
        return {
            "target": self.target,
            "seeds": self.seeds,
            "best": self.best.method,
            "methods": [outcome.as_dict() for outcome in self.outcomes],
        }


@dataclass(frozen=True)
class Curve:
    """One run: its records, and why it failed, if it did."""

    records: Sequence[Record]
    failure: str | None = None

    @property
    def accuracies(self) -> list[float]:
        return [math.nan if record.accuracy is None else record.accuracy for record in self.records]

    @property
    def losses(self) -> list[float]:
        return [math.nan if loss is None else loss for loss in judged_losses(self.records)]

    def rounds(self) -> list[float]:
        return [record.round for record in self.records]

    def megabytes(self, up: bool = True, down: bool = True) -> list[float]:
        """Sent until the end of each round, up and down."""
        sent = accumulate(up * record.bytes_up + down * record.bytes_down for record in self.records)
        return [total / MEGABYTE for total in sent]

    def seconds(self) -> list[float]:
        """Elapsed until the end of each round."""
        return list(accumulate(record.seconds for record in self.records))

    def virtual_seconds(self) -> list[float] | None:
        """Elapsed on the virtual clock until the end of each round; None without one."""
        known = [record.virtual_seconds for record in self.records if record.virtual_seconds is not None]
        return list(accumulate(known)) if len(known) == len(self.records) else None

    @property
    def final(self) -> float | None:
        """The last accuracy; None after a failure. Without a test set not every round has one."""
        measured = [record.accuracy for record in self.records if record.accuracy is not None]
        return measured[-1] if measured and self.failure is None else None

    def first_at(self, target: float) -> int | None:
        """The index of the first round with at least that accuracy."""
        return next((i for i, accuracy in enumerate(self.accuracies) if accuracy >= target), None)


def compare(
    runs: Mapping[str, Sequence[Curve]], settings: Mapping[str, Mapping[str, Any]], target: float | None = None
) -> Comparison:
    """Compare methods by their runs, one per seed in the same order; the target defaults to `default_target`."""
    if not runs or len({len(curves) for curves in runs.values()}) != 1:
        raise ValueError("every method needs one run per seed")
    if target is None:
        target = default_target(runs)
    complete = {method: complete_finals(curves) for method, curves in runs.items()}
    # methods with a failed run come last
    order = sorted(runs, key=lambda method: -spread(complete[method]).mean if complete[method] else 1.0)
    best, *others = order
    to_best = {
        method: paired_difference(complete[method], complete[best])
        for method in others
        if complete[method] and complete[best]
    }
    outcomes = tuple(_outcome(method, settings[method], runs[method], target, to_best.get(method)) for method in order)
    return Comparison(outcomes, target, len(runs[best]))


def default_target(runs: Mapping[str, Sequence[Curve]]) -> float:
    """95 % of the worst method's mean final accuracy, in whole per cent: an accuracy within reach of every method.

    Methods that end below half of the best one did not learn, and are ignored.
    """
    means = [
        spread(through).mean
        for curves in runs.values()
        if (through := [curve.final for curve in curves if curve.final is not None])
    ]
    learned = [mean for mean in means if mean >= max(means) / 2]
    return max(0.01, math.floor(95 * min(learned)) / 100) if learned else 0.5


def _outcome(
    method: str, settings: Mapping[str, Any], curves: Sequence[Curve], target: float, to_best: ConfidenceInterval | None
) -> MethodOutcome:
    firsts = [(curve, curve.first_at(target)) for curve in curves]
    megabytes, seconds = totals(curves)
    return MethodOutcome(
        method=method,
        settings=settings,
        finals=tuple(curve.final for curve in curves),
        rounds_to_target=tuple(None if at is None else curve.records[at].round for curve, at in firsts),
        megabytes_to_target=tuple(None if at is None else curve.megabytes()[at] for curve, at in firsts),
        seconds_to_target=tuple(None if at is None else curve.seconds()[at] for curve, at in firsts),
        megabytes=megabytes,
        seconds=seconds,
        failures=tuple(curve.failure for curve in curves),
        to_best=to_best,
    )


def totals(curves: Sequence[Curve]) -> tuple[MeanAndDeviation, MeanAndDeviation]:
    """Megabytes and seconds of whole runs."""
    each = ([curve.megabytes() for curve in curves], [curve.seconds() for curve in curves])
    megabytes, seconds = (spread([(so_far or [0.0])[-1] for so_far in runs]) for runs in each)
    return megabytes, seconds


def complete_finals(curves: Sequence[Curve]) -> list[float]:
    """The final accuracies of all seeds; empty if a run failed."""
    through = [curve.final for curve in curves if curve.final is not None]
    return through if len(through) == len(curves) else []
