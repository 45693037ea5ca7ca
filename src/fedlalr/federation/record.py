"""The record of a round."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from fedlalr.federation.replies.screening import Rejection


class Distribution(NamedTuple):
    """A quantity over the clients, each evaluated on its own samples."""

    mean: float
    spread: float
    """The standard deviation over the clients."""
    worst: float
    """The mean over the worst 10 % of the clients, at least one."""
    clients: int
    """How many were evaluated."""


@dataclass(frozen=True)
class Record:
    """The results of one round."""

    round: int
    """From 1."""
    loss: float
    """Loss of the server's model on the test set after the round; the training loss without a test set."""
    accuracy: float | None
    """Accuracy on the test set or, without one, the mean over the clients after rounds in which they are evaluated;
    None otherwise, and if targets are not classes."""
    train_loss: float
    """Mean over the accepted clients of the loss over their local steps."""
    lr: float
    seconds: float
    bytes_up: int
    """Everything the clients sent: slots, and the module's buffers."""
    bytes_down: int
    """Everything the server sent."""
    clients: int
    """Clients whose replies were reduced."""
    rejected: tuple[Rejection, ...] = ()
    epsilon: float | None = None
    """The privacy that the run has spent so far, at its δ; None without privacy."""
    clipped: tuple[int, ...] = ()
    """Clients whose change was too long and was shortened."""
    repeatedly: tuple[int, ...] = ()
    """Clients that were rejected in this round and in each of their last few rounds."""
    timing: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent in each part of the round."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The caller's metrics, on the test set."""
    per_client: Mapping[str, Distribution] = field(default_factory=dict)
    """`loss` and `accuracy` over the clients; empty in a round after which they are not evaluated."""
    virtual_seconds: float | None = None
    """Time on the virtual clock; None in a run without one."""
    staleness: float | None = None
    """How many updates old the replies' versions were, on average; None in a synchronous run."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values. JSON has only finite numbers: NaN becomes None, infinities "Infinity" and "-Infinity"."""
        plain = asdict(self)
        plain["rejected"] = [rejection._asdict() for rejection in self.rejected]
        plain["metrics"] = _stored(self.metrics)
        plain["per_client"] = {name: _stored(each._asdict()) for name, each in self.per_client.items()}
        return _stored(plain)

    def numbers(self) -> dict[str, float | None]:
        """Every number by name: clients in a list are counted, the parts of the time are under `timing/`, the caller's
        metrics under `metrics/`, and those over the clients under names such as `per_client/accuracy/mean`."""
        row = {**vars(self), **{name: len(getattr(self, name)) for name in ("rejected", "clipped", "repeatedly")}}
        parts = {f"{kind}/{name}": value for kind in ("timing", "metrics") for name, value in row.pop(kind).items()}
        for name, over in row.pop("per_client").items():
            parts |= {f"per_client/{name}/{part}": value for part, value in over._asdict().items()}
        return {**row, **parts}

    def to_json(self) -> str:
        """One line for `metrics.jsonl`."""
        return json.dumps(self.as_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `to_json`."""
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError(f"a record must be a table of values, not a {type(found).__name__}")
        plain = _with_infinities(found)
        if "buffer_bytes_up" in plain:
            raise ValueError("it was written by fedlalr 0.1, whose records this version does not read; run it again")
        plain["rejected"] = tuple(Rejection(**rejection) for rejection in plain["rejected"])
        for name in ("clipped", "repeatedly"):
            plain[name] = tuple(plain.get(name, ()))
        for name in ("loss", "train_loss"):
            plain[name] = math.nan if plain[name] is None else plain[name]
        plain["metrics"] = _with_nan(plain.get("metrics", {}))
        plain["per_client"] = distributions_in(plain.get("per_client", {}))
        record = cls(**plain)
        record._check_numbers()
        return record

    def _check_numbers(self) -> None:
        """Reject a record in which a number is something else, as in an edited file."""
        for name, value in self.numbers().items():
            missing = name in ("accuracy", "epsilon", "virtual_seconds", "staleness") and value is None
            if not missing and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} is {value!r}, not a number")


Samples = Literal["test", "held-out", "training"]


def judged_on(history: Iterable[Record]) -> Samples:
    """The samples on which a run is judged: those of the test set or, without one, the clients' held-out samples.
    Without either, those it is trained on."""
    records = list(history)
    if any(_is_tested(record) for record in records):
        return "test"
    return "held-out" if any(record.per_client for record in records) else "training"


def judged_losses(history: Sequence[Record]) -> list[float | None]:
    """The loss by which a run is judged after each round. On held-out samples it is the mean over the clients, None in
    rounds after which they are not evaluated."""
    if judged_on(history) != "held-out":
        return [record.loss for record in history]
    return [held_out_loss(record) for record in history]


def held_out_loss(record: Record) -> float | None:
    """The mean over the clients of the loss on their own samples; None after rounds without such an evaluation."""
    return record.per_client["loss"].mean if "loss" in record.per_client else None


def loss_name(record: Record) -> str:
    """What `record.loss` is."""
    return "test loss" if _is_tested(record) else "training loss"


def _is_tested(record: Record) -> bool:
    """Whether the loss is that of a test set: without one, it is the training loss, which may be NaN."""
    return record.loss != record.train_loss and not (math.isnan(record.loss) and math.isnan(record.train_loss))


def distributions_in(plain: Mapping[str, Mapping[str, Any]]) -> dict[str, Distribution]:
    """The distributions in JSON."""
    return {name: Distribution(**_with_nan(each)) for name, each in plain.items()}


def over_clients(per_client: Mapping[str, Distribution]) -> str:
    """The accuracy over the clients in words, or without one the loss; ends with a comma.

    >>> over_clients({"accuracy": Distribution(0.8, 0.05, 0.7, 20)})
    'over clients accuracy 80.0% ± 5.0% (worst 10 %: 70.0%), '
    """
    if "accuracy" in per_client:
        mean, spread, worst, _ = (f"{value:.1%}" for value in per_client["accuracy"])
        return f"over clients accuracy {mean} ± {spread} (worst 10 %: {worst}), "
    if "loss" in per_client:
        mean, spread, worst, _ = (f"{value:.4g}" for value in per_client["loss"])
        return f"over clients loss {mean} ± {spread} (worst 10 %: {worst}), "
    return ""


def spent(record: Record) -> str:
    """The privacy spent, in words, if there is any; ends with a comma."""
    return "" if record.epsilon is None else f"epsilon {record.epsilon:.3g}, "


_INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}


def _with_infinities(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _INFINITIES.get(value, value) if isinstance(value, str) else value for name, value in values.items()}


def _with_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in _with_infinities(values).items()}


def _stored(values: Mapping[str, Any]) -> dict[str, Any]:
    names = {number: name for name, number in _INFINITIES.items()}
    odd = {k: names.get(v) for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
    return {**values, **odd}
