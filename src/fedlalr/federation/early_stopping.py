"""`fl.EarlyStopping`: ends a run that no longer improves."""

from __future__ import annotations

import math
from typing import Literal

from fedlalr.common.checks import check_choice
from fedlalr.common.option_types import Count, NotNegative, check_type
from fedlalr.federation.observers import Observer, RunInfo, Stop
from fedlalr.federation.record import Record, judged_losses

_MODES = {"loss": "min", "train_loss": "min", "accuracy": "max"}
"""Whether smaller or larger values of a record's own measures are better."""


class EarlyStopping(Observer):
    """Ends a run when a metric has not improved for some rounds.

    patience: Rounds without an improvement after which the run ends. Without a test set, `"loss"` and `"accuracy"` are
        means over evaluated clients, and only every `evaluate_every`-th round counts.
    metric: `"loss"`, `"accuracy"`, `"train_loss"`, or the name of one of your own `metrics`.
    min_delta: Smaller changes are no improvement.
    mode: Whether smaller (`"min"`) or larger (`"max"`) values are better; needed for your own metrics.

    A resumed run counts from its history, so it ends after the same round as a run that was not interrupted.
    """

    def __init__(
        self,
        patience: int = 10,
        metric: str = "loss",
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        check_type("patience", patience, Count)
        check_type("min_delta", min_delta, NotNegative)
        if mode is None and metric not in _MODES:
            raise ValueError(
                f"{metric!r} may be a metric of your own: add mode='min' if smaller values are better, or mode='max' "
                f"if larger ones are (without mode: {', '.join(map(repr, _MODES))})"
            )
        chosen = mode or _MODES[metric]
        check_choice("mode", chosen, ("min", "max"))
        self.patience, self.metric, self.min_delta = patience, metric, min_delta
        self._sign = 1.0 if chosen == "min" else -1.0
        self._evaluated_every = 1
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None
        """The best value so far."""
        self.best_round = 0
        self.waited = 0
        """Rounds since then."""

    def on_start(self, info: RunInfo) -> None:
        self._reset()
        self._evaluated_every = info.accuracy_every
        for record in info.history:
            self._see(record)
        self._stop_if_due()

    def on_round(self, record: Record) -> None:
        self._see(record)
        self._stop_if_due()

    def _see(self, record: Record) -> None:
        if self.metric in ("accuracy", "loss") and record.round % self._evaluated_every:
            return  # also in the last round of a resumed run
        value = self._value(record)
        best = math.inf if self.best is None else self._sign * self.best
        if self._sign * value < best - self.min_delta:  # never true of NaN
            self.best, self.best_round, self.waited = value, record.round, 0
        else:
            self.waited += 1

    def _value(self, record: Record) -> float:
        value = getattr(record, self.metric) if self.metric in _MODES else record.metrics.get(self.metric)
        if self.metric == "loss":
            (value,) = judged_losses([record])
        if value is None:
            measured = [name for name in _MODES if getattr(record, name) is not None]
            raise ValueError(
                f"EarlyStopping watches {self.metric!r}, but round {record.round} has no such value; it has "
                f"{', '.join([*measured, *record.metrics])}. Accuracy needs a test set, test=(…), or held-out samples "
                f"of the clients, holdout=0.2; your own metrics need a test set"
            )
        return float(value)

    def _stop_if_due(self) -> None:
        if self.waited >= self.patience:
            raise Stop
