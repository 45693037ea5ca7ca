"""The instruction that the server sends to a client at the start of a round, with the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Instruction:
    """One client's task in one round."""

    run: str
    """The run's name, unchanged when resumed."""
    round: int
    """t, from 1."""
    lr: float
    """The clients' learning rate in this round, after decay."""
    client: int
    cohort: int
    population: int
    seed: int
    contract: str
    """The digest of the settings that the client must train with."""
    layout: str
    """How the arrays are packed, see `arrays.py`."""
    kept: int = 0
    """The client continues from its state after this round; 0: from the initial state."""
    taken: float = 1.0
    """The share that the server took of the last change that a kept slot follows: less than 1 if it was clipped."""
    settled: int = 0
    """The server will not request a client state from before this round."""
    deadline: float = 0.0
    """Seconds of local training after which the client sends what it has; 0: it finishes its local steps."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Instruction:
        """An instruction from the plain values of a Flower record."""
        kinds: dict[str, type] = {"int": int, "float": float, "str": str}
        found: dict[str, Any] = {}
        for field in fields(cls):
            value, kind = given.get(field.name), kinds[str(field.type)]
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"the instruction's {field.name} must be {kind.__name__}, not {value!r}")
            found[field.name] = value
        return cls(**found)
