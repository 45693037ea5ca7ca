"""Types of options that define the allowed values.

>>> check_type("rounds", 0, Count)
Traceback (most recent call last):
ValueError: rounds must be a whole number of at least 1, not 0
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from fedlalr.common.checks import (
    MOST,
    check_choice,
    check_count,
    check_flag,
    check_not_negative,
    check_positive,
    check_seed,
)


class Bounds(NamedTuple):
    """Limits of a number, under the names that Pydantic gives them: a configuration has the same."""

    ge: int | None = None
    gt: int | None = None
    le: int | None = None
    lt: int | None = None


Count = Annotated[int, Bounds(ge=1, le=MOST)]
Positive = Annotated[float, Bounds(gt=0)]
NotNegative = Annotated[float, Bounds(ge=0)]
Seed = Annotated[int, Bounds(ge=0, lt=2**63)]

_CHECKS: dict[Any, Callable[[str, Any, str], None]] = {
    Count: check_count,
    Positive: check_positive,
    NotNegative: check_not_negative,
    Seed: check_seed,
    bool: check_flag,
}


def check_type(name: str, value: object, kind: Any) -> None:
    """Reject a value that does not match a type of this module or a `Literal`, each also `| None`; other types are
    not checked."""
    also = ""
    if NoneType in get_args(kind):
        if value is None:
            return
        others = [each for each in get_args(kind) if each is not NoneType]
        kind, also = others[0] if len(others) == 1 else None, " or None"
    if get_origin(kind) is Literal:
        check_choice(name, value, get_args(kind))
    elif kind in _CHECKS:
        _CHECKS[kind](name, value, also)
