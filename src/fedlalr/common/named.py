"""Objects that a setting names, with their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fedlalr.common.suggestions import hint


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
    if given not in table:
        raise ValueError(f"{unknown} {given!r}; choose one of {', '.join(table)}.{hint(given, table)}")
    allowed = list(inspect.signature(table[given]).parameters)
    for option in options:
        if option not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise ValueError(f"{called.format(repr(given))} has no option {option!r}; {takes}")
    return table[given](**options)


def made(given: object, kind: type, name: str) -> Any:
    """An object of a class, also given as a mapping of its arguments, or None; `name` is what the user calls it."""
    if given is None or isinstance(given, kind):
        return given
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be fl.{kind.__name__}(…), a dict of its arguments, or None, not {given!r}")
    parameters = inspect.signature(kind).parameters
    for option in given:
        if option not in parameters:
            takes = ", ".join(parameters)
            raise ValueError(f"{name} has no option {option!r}; it takes {takes}.{hint(str(option), parameters)}")
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in given:
            raise ValueError(f"{name} needs {option}; it takes {', '.join(parameters)}")
    return kind(**given)
