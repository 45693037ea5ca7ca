"""What is said when a configuration cannot be used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

LONGEST_SHOWN = 200
"""Characters."""


class ConfigError(ValueError):
    """A configuration that cannot be run. The message says what was given, what is allowed and what is near."""


def shortened(text: str) -> str:
    """As much of what was given as an error repeats.

    >>> len(shortened("9" * 1_000_000))
    201
    """
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def nearest(given: str, choices: Iterable[str]) -> str | None:
    """The choice most like what was given, by its whole name or by its last part.

    >>> nearest("alpha", ["partition.alpha", "rounds"])
    'partition.alpha'
    >>> nearest("zzz", ["rounds"]) is None
    True
    """
    choices = list(choices)
    whole = difflib.get_close_matches(given.lower(), choices, n=1, cutoff=0.6)
    if whole:
        return whole[0]
    last = given.lower().rsplit(".", 1)[-1]
    by_last: dict[str, str] = {}
    for choice in choices:
        by_last.setdefault(choice.rsplit(".", 1)[-1], choice)
    found = difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)
    return by_last[found[0]] if found else None


def hint(given: str, choices: Iterable[str]) -> str:
    """` Did you mean …?`, or nothing where no choice is near."""
    near = nearest(given, choices)
    return f" Did you mean {near!r}?" if near else ""


def listed(choices: Sequence[str]) -> str:
    return ", ".join(choices) if choices else "none"
