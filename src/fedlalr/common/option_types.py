"""Types of options that define the allowed values.

>>> check_type("rounds", 0, Count)
Traceback (most recent call last):
ValueError: rounds must be a whole number of at least 1, not 0
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from fedlalr.common.checks import MOST, check_choice, whole_number


class Bounds(NamedTuple):
    """Limits of a number, under the names that Pydantic gives them: a configuration has the same."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def contain(self, number: float) -> bool:
        given = {name: limit for name, limit in self._asdict().items() if limit is not None}
        return all(getattr(operator, name)(number, limit) for name, limit in given.items())


Count = Annotated[int, Bounds(ge=1, le=MOST)]
Positive = Annotated[float, Bounds(gt=0), "be a finite number above 0"]
NotNegative = Annotated[float, Bounds(ge=0), "be a finite number of at least 0"]
Fraction = Annotated[float, Bounds(ge=0, lt=1), "lie in [0, 1)"]
Share = Annotated[float, Bounds(gt=0, le=1), "lie in (0, 1]"]
Seed = Annotated[int, Bounds(ge=0, lt=2**63), "be a whole number from 0 to 2^63 - 1"]
Betas = Annotated[tuple[float, float], Bounds(ge=0, lt=1)]


def check_fields(options: Any, called: str = "{field}") -> None:
    """Reject a dataclass with a value that its field's type, or the `check` in the field's metadata, does not allow.

    `called` is what messages call a field, with {field} and {owner}, the name of the class.
    """
    owner, kinds = type(options).__name__, _kinds(options.__class__)
    for each in fields(options):
        value = getattr(options, each.name)
        check_type(called.format(field=each.name, owner=owner), value, kinds[each.name])
        if check := each.metadata.get("check"):
            check(value)


class Checked:
    """A dataclass that checks its fields when it is created."""

    called: ClassVar[str] = "{field}"
    """What messages call a field: see `check_fields`."""

    def __post_init__(self) -> None:
        check_fields(self, self.called)


@cache  # they are evaluated from text, which takes longer than all checks
def _kinds(of: type) -> dict[str, Any]:
    return get_type_hints(of, include_extras=True)


def check_type(name: str, value: object, kind: Any, also: str = "") -> None:
    """Reject a value that does not match a type of this module or a `Literal`, each also `| None`; other types are
    not checked. `also` says what else is allowed."""
    if NoneType in get_args(kind):
        if value is None:
            return
        others = [each for each in get_args(kind) if each is not NoneType]
        kind, also = others[0] if len(others) == 1 else None, " or None"
    if get_origin(kind) is Literal:
        check_choice(name, value, get_args(kind))
    elif kind is bool and not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False{also}, not {value!r}")
    elif kind == Betas:
        _check_betas(name, value, also)
    elif get_origin(kind) is Annotated:
        base, bounds, *must = get_args(kind)
        if not must:
            whole_number(name, value, bounds.ge, bounds.le, also)
        elif not _is_number(value, base) or not bounds.contain(value):
            error = TypeError if base is int else ValueError
            raise error(f"{name} must {must[0]}{also}, not {_shown(value, base)}")


def _check_betas(name: str, betas: object, also: str) -> None:
    if isinstance(betas, str) or not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"{name} must be a pair (beta1, beta2){also}, not {betas!r}")
    for symbol, beta in zip(("beta1", "beta2"), betas, strict=True):
        check_type(symbol if name == "betas" else f"{symbol} of {name}", beta, Fraction)


def _is_number(value: Any, base: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, int if base is int else int | float):
        return False
    return abs(value) <= sys.float_info.max  # some integers are larger than any float


def _shown(value: object, base: type) -> str:
    """The value and, for a NumPy or torch number, how to convert it to a Python number."""
    foreign = hasattr(value, "__float__") and not isinstance(value, int | float) and not getattr(value, "ndim", 0)
    return f"{value!r}; convert it with {base.__name__}(value)" if foreign else repr(value)
