"""Comparison of methods: accuracy, rounds to a target, and cost; without an accuracy, their final loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from fedlalr.config.grid import without_accuracy
from fedlalr.federation import Record
from fedlalr.federation.record import judged_losses, judged_on
from fedlalr.report.statistics import ConfidenceInterval, MeanAndDeviation, paired_difference, spread

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class MethodOutcome:
    """One method over all seeds. Lists are in the order of the seeds; a failed run has no final value."""

    method: str
    settings: Mapping[str, Any]
    finals: tuple[float | None, ...]
    """Accuracy, or without any the loss, after the last round; None also for a loss that is not finite."""
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
    """Paired difference of the final value to the best method's; None for the best itself and if a run has none."""

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
    measure: str
    """What they are compared by, such as "test accuracy" or "held-out loss"."""
    target: float | None
    """An accuracy; None if they are compared by losses."""
    seeds: int

    @property
    def best(self) -> MethodOutcome:
        return self.outcomes[0]

    def as_dict(self) -> dict[str, Any]:
        return {
            "measure": self.measure,
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
        """Megabytes sent until the end of each round, up, down or both."""
        sent = accumulate(up * record.bytes_up + down * record.bytes_down for record in self.records)
        return [total / MEGABYTE for total in sent]

    def seconds(self) -> list[float]:
        """Seconds until the end of each round."""
        return list(accumulate(record.seconds for record in self.records))

    def virtual_seconds(self) -> list[float] | None:
        """Seconds on the virtual clock until the end of each round; None without one."""
        known = [record.virtual_seconds for record in self.records if record.virtual_seconds is not None]
        return list(accumulate(known)) if len(known) == len(self.records) else None

    @property
    def final(self) -> float | None:
        """The last accuracy; None after a failure. Without a test set not every round has one."""
        measured = [record.accuracy for record in self.records if record.accuracy is not None]
        return measured[-1] if measured and self.failure is None else None

    @property
    def final_loss(self) -> float | None:
        """The last loss; None after a failure and if it is not finite."""
        measured = [loss for loss in judged_losses(self.records) if loss is not None]
        return measured[-1] if measured and math.isfinite(measured[-1]) and self.failure is None else None

    def first_at(self, target: float) -> int | None:
        """The index of the first round with at least that accuracy."""
        return next((i for i, accuracy in enumerate(self.accuracies) if accuracy >= target), None)


def compare(
    runs: Mapping[str, Sequence[Curve]], settings: Mapping[str, Mapping[str, Any]], target: float | None = None
) -> Comparison:
    """Compare methods by their runs, one per seed in the same order, by accuracy or, without one, by loss.

    The target defaults to `default_target`.
    """
    if not runs or len({len(curves) for curves in runs.values()}) != 1:
        raise ValueError("every method needs one run per seed")
    losses = without_accuracy(curve.records for curves in runs.values() for curve in curves)
    if losses:
        target = None
    elif target is None:
        target = default_target(runs)
    complete = {method: complete_finals(curves, losses) for method, curves in runs.items()}
    sign = 1 if losses else -1
    # methods with a run without a final value come last
    order = sorted(runs, key=lambda method: sign * spread(complete[method]).mean if complete[method] else math.inf)
    best, *others = order
    to_best = {
        method: paired_difference(complete[method], complete[best])
        for method in others
        if complete[method] and complete[best]
    }
    outcomes = tuple(_outcome(method, settings[method], runs[method], target, to_best.get(method)) for method in order)
    return Comparison(outcomes, measure_of(runs, losses), target, len(runs[best]))


def measure_of(runs: Mapping[str, Sequence[Curve]], losses: bool) -> str:
    """Accuracy or loss, with the samples on which runs are judged if these are the same for all."""
    samples = {judged_on(curve.records) for curves in runs.values() for curve in curves if curve.records}
    return " ".join([*(samples if len(samples) == 1 else ()), "loss" if losses else "accuracy"])


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
    method: str,
    settings: Mapping[str, Any],
    curves: Sequence[Curve],
    target: float | None,
    to_best: ConfidenceInterval | None,
) -> MethodOutcome:
    firsts = [(curve, None if target is None else curve.first_at(target)) for curve in curves]
    megabytes, seconds = totals(curves)
    return MethodOutcome(
        method=method,
        settings=settings,
        finals=tuple(curve.final_loss if target is None else curve.final for curve in curves),
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


def complete_finals(curves: Sequence[Curve], losses: bool = False) -> list[float]:
    """The final accuracies, or losses, of all seeds; empty if a run has none."""
    finals = [curve.final_loss if losses else curve.final for curve in curves]
    through = [final for final in finals if final is not None]
    return through if len(through) == len(curves) else []
