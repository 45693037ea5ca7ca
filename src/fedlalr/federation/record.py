"""The record of a round."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedlalr.federation.replies.screening import Rejection


@dataclass(frozen=True)
class Record:
    """The results of one round."""

    round: int
    """From 1."""
    loss: float
    """Loss of the server's model on the test set after the round; the training loss without a test set."""
    accuracy: float | None
    """Accuracy on the test set; None without one, or if targets are not classes."""
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
    clipped: tuple[int, ...] = ()
    """Clients whose change was too long and was shortened."""
    repeatedly: tuple[int, ...] = ()
    """Clients that were rejected in this round and in each of their last few rounds."""
    timing: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent in each part of the round."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The caller's metrics, on the test set."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values; non-finite numbers become None, as JSON cannot represent them."""
        plain = asdict(self)
        plain["rejected"] = [rejection._asdict() for rejection in self.rejected]
        plain["metrics"] = _finite(self.metrics)
        return _finite(plain)

    def numbers(self) -> dict[str, float | None]:
        """Every number by name: clients in a list are counted, the parts of the time are under `timing/`, the caller's
        metrics under `metrics/`."""
        row = {**vars(self), **{name: len(getattr(self, name)) for name in ("rejected", "clipped", "repeatedly")}}
        parts = {f"{kind}/{name}": value for kind in ("timing", "metrics") for name, value in row.pop(kind).items()}
        return {**row, **parts}

    def to_json(self) -> str:
        """One line for `metrics.jsonl`."""
        return json.dumps(self.as_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `to_json`."""
        plain = json.loads(line)
        if "buffer_bytes_up" in plain:
            raise ValueError("it was written by fedlalr 0.1, whose records this version does not read; run it again")
        plain["rejected"] = tuple(Rejection(**rejection) for rejection in plain["rejected"])
        for name in ("clipped", "repeatedly"):
            plain[name] = tuple(plain.get(name, ()))
        for name in ("loss", "train_loss"):
            plain[name] = math.nan if plain[name] is None else plain[name]
        metrics = plain.get("metrics", {})
        plain["metrics"] = {name: math.nan if value is None else value for name, value in metrics.items()}
        record = cls(**plain)
        record._check_numbers()
        return record

    def _check_numbers(self) -> None:
        """Reject a record in which a number is something else, as in an edited file."""
        others = ("rejected", "clipped", "repeatedly", "timing", "metrics")
        numbers = {name: value for name, value in vars(self).items() if name not in others}
        for name, value in {**numbers, **self.timing, **self.metrics}.items():
            missing = name == "accuracy" and value is None
            if not missing and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} is {value!r}, not a number")


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
