"""Objects that a setting names, with their options; and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from typing import Any


class UnknownOption(TypeError, ValueError):
    """An option that does not exist: a `TypeError` as in Python, and a `ValueError` in a configuration."""


def check_known(unknown: str, name: str, table: Collection[str], also: str = "") -> None:
    """Reject a name that is not in the table. `unknown` begins the message; `also` says what else is allowed."""
    if name not in table:
        raise ValueError(f"{unknown} {name!r}; choose one of {', '.join(table)}{also}.{hint(name, table)}")


def check_names(names: str, given: Iterable[str], owner: str, known: Collection[str]) -> None:
    """Reject names that are not known. `names` and `owner` are the two halves of the message."""
    for name in given:
        if name not in known:
            raise ValueError(f"{names} {name!r}, but {owner} {', '.join(known)}.{hint(name, known)}")


def check_options(owner: str, given: Iterable[str], allowed: Collection[str]) -> None:
    """Reject options that their owner does not have."""
    for option in given:
        if option not in allowed:
            takes = ", ".join(allowed) or "none"
            raise UnknownOption(f"{owner} has no option {option!r}; it takes {takes}.{hint(option, allowed)}")


@cache  # a configuration with a grid asks a hundred times
def options_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """The options of a class or function with their defaults, without those that a `partial` fixes."""
    fixed = factory.keywords if isinstance(factory, partial) else {}
    parameters = inspect.signature(factory).parameters
    return {name: parameter.default for name, parameter in parameters.items() if name not in fixed}


def built(given: object, table: Mapping[str, Callable[..., Any]], unknown: str, called: str) -> Any:
    """The object of a name in the table, or of a mapping with its name and its options; anything else as it is.

    `unknown` begins the message about a name that is not in the table, and `called`, with the name in place of {},
    the one about an option that the object does not have.
    """
    options: dict[str, Any] = {}
    if isinstance(given, Mapping):
        options = {str(key): value for key, value in given.items() if key != "name"}
        given = given.get("name")
    if not isinstance(given, str):
        return given
    return created(given, options, table, unknown, called)


def created(
    name: str, options: Mapping[str, Any], table: Mapping[str, Callable[..., Any]], unknown: str, called: str = "{}"
) -> Any:
    """The object of a name in the table, with its options; see `built`."""
    check_known(unknown, name, table)
    check_options(called.format(name), options, options_of(table[name]))
    return table[name](**options)


def made(given: object, kind: type, name: str) -> Any:
    """An object of a class, also given as a mapping of its arguments, or None; `name` is what the user calls it."""
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be fl.{kind.__name__}(…), a dict of its arguments, or None, not {given!r}")
    options = options_of(kind)
    check_options(name, given, options)
    for option, default in options.items():
        if default is inspect.Parameter.empty and option not in given:
            raise ValueError(f"{name} needs {option}; it takes {', '.join(options)}")
    return kind(**given)


def nearest(given: object, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The choice most similar to a name, comparing whole names or the parts after the last dot.

    >>> nearest("alpha", ["partition.alpha", "rounds"])
    'partition.alpha'
    >>> nearest("zzz", ["rounds"]) is None
    True
    """
    text, choices = str(given).lower(), list(choices)
    whole = difflib.get_close_matches(text, choices, n=1, cutoff=cutoff)
    if whole:
        return whole[0]
    by_last: dict[str, str] = {}
    for choice in choices:
        by_last.setdefault(choice.rsplit(".", 1)[-1], choice)
    found = difflib.get_close_matches(text.rsplit(".", 1)[-1], by_last, n=1, cutoff=max(cutoff, 0.75))
    return by_last[found[0]] if found else None


def hint(given: object, choices: Iterable[str]) -> str:
    """` Did you mean …?`, or an empty text if no choice is similar."""
    near = nearest(given, choices)
    return f" Did you mean {near!r}?" if near else ""
