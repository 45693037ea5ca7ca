"""Suggestions for misspelt names: the ends of messages that say "Did you mean …?"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
