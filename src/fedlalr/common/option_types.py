"""Types of options that define the allowed values.

>>> check_type("rounds", 0, Count)
Traceback (most recent call last):
ValueError: rounds must be a whole number of at least 1, not 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from fedlalr.common import checks
from fedlalr.common.checks import MOST


class Bounds(NamedTuple):
    """Limits of a number, under the names that Pydantic gives them: a configuration has the same."""

    ge: int | None = None
    gt: int | None = None
    le: int | None = None
    lt: int | None = None


Count = Annotated[int, Bounds(ge=1, le=MOST)]
Positive = Annotated[float, Bounds(gt=0)]
NotNegative = Annotated[float, Bounds(ge=0)]
Fraction = Annotated[float, Bounds(ge=0, lt=1)]
Share = Annotated[float, Bounds(gt=0, le=1)]
Seed = Annotated[int, Bounds(ge=0, lt=2**63)]
Betas = Annotated[tuple[float, float], Bounds(ge=0, lt=1)]

_CHECKS: dict[Any, Callable[[str, Any, str], None]] = {
    Count: checks.check_count,
    Positive: checks.check_positive,
    NotNegative: checks.check_not_negative,
    Fraction: checks.check_fraction,
    Share: checks.check_share,
    Seed: checks.check_seed,
    Betas: checks.check_betas,
    bool: checks.check_flag,
}


def check_fields(options: Any) -> None:
    """Reject a dataclass with a value that its field's type, or the `check` in the field's metadata, does not allow."""
    kinds = _kinds(options.__class__)
    for each in fields(options):
        value = getattr(options, each.name)
        check_type(each.name, value, kinds[each.name])
        if check := each.metadata.get("check"):
            check(value)


class Checked:
    """A dataclass that checks its fields when it is created."""

    def __post_init__(self) -> None:
        check_fields(self)


@cache  # they are evaluated from text, which takes longer than all checks
def _kinds(of: type) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)


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
        checks.check_choice(name, value, get_args(kind))
    elif kind in _CHECKS:
        _CHECKS[kind](name, value, also)
