"""What is recorded of every round."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from fedlalr.federation.replies.screening import Rejection


@dataclass(frozen=True)
class Record:
    """One round, as it happened."""

    round: int
    """From 1."""
    loss: float
    """Of the server's model on the test set after the round; the training loss where there is no test set."""
    accuracy: float | None
    """On the test set; None without one or where targets are not classes."""
    train_loss: float
    """Mean over the accepted clients of the loss over their local steps."""
    lr: float
    seconds: float
    bytes_up: int
    """Of the slots, from all clients that replied."""
    bytes_down: int
    buffer_bytes_up: int
    """Of the modules' buffers (normalisation statistics), counted apart."""
    buffer_bytes_down: int
    clients: int
    """Whose replies were reduced."""
    rejected: tuple[Rejection, ...] = ()
    timing: Mapping[str, float] = field(default_factory=dict)
    """Seconds spent in each part of the round."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """The caller's own, on the test set."""

    @property
    def sent_up(self) -> int:
        """Bytes from the clients, buffers included."""
        return self.bytes_up + self.buffer_bytes_up

    @property
    def sent_down(self) -> int:
        """Bytes to the clients, buffers included."""
        return self.bytes_down + self.buffer_bytes_down

    def as_dict(self) -> dict[str, Any]:
        """Plain values; numbers that are not finite become None, as JSON has no other word for them."""
        plain = asdict(self)
        plain["rejected"] = [rejection._asdict() for rejection in self.rejected]
        plain["measures"] = _finite(self.measures)
        return _finite(plain)

    def to_json(self) -> str:
        """One line for `metrics.jsonl`."""
        return json.dumps(self.as_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The inverse of `to_json`."""
        plain = json.loads(line)
        plain["rejected"] = tuple(Rejection(**rejection) for rejection in plain["rejected"])
        for name in ("loss", "train_loss"):
            plain[name] = math.nan if plain[name] is None else plain[name]
        measures = plain.get("measures", {})
        plain["measures"] = {name: math.nan if value is None else value for name, value in measures.items()}
        return cls(**plain)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
