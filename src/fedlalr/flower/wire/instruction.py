"""What the server tells a client at the beginning of a round, beside the arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Instruction:
    """One client's part in one round."""

    run: str
    """The run's own name, the same after it was resumed."""
    round: int
    """t, from 1."""
    lr: float
    """The clients' rate in this round, decay applied."""
    client: int
    cohort: int
    population: int
    seed: int
    contract: str
    """The digest of the settings that the client must train with."""
    layout: str
    """How the arrays travel, see `exchange.py`."""
    kept: int = 0
    """What the client keeps counts as it was after this round; 0: as at the start."""
    settled: int = 0
    """The server never goes back to what the client kept before this round."""

    def as_dict(self) -> dict[str, int | float | str]:
        """Plain values, as a record of Flower's holds them."""
        return asdict(self)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Instruction:
        """The inverse of `as_dict`."""
        kinds: dict[str, type] = {"int": int, "float": float, "str": str}
        found: dict[str, Any] = {}
        for field in fields(cls):
            value, kind = given.get(field.name), kinds[str(field.type)]
            if isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"the instruction's {field.name} is {value!r}, and {kind.__name__} is expected")
            found[field.name] = value
        return cls(**found)
