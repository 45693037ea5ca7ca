"""Failures of several runs, each reported once for all runs it ended."""

from __future__ import annotations

import re
from collections.abc import Iterable


def alike(failures: Iterable[tuple[str, str]]) -> list[tuple[list[str], str]]:
    """Group runs by their failure: the names, one for each run, and the failure as text.

    >>> alike([("a", "1 client (7): NaN"), ("b", "1 client (3): NaN"), ("c", "disk full")])
    [(['a', 'b'], '1 client: NaN'), (['c'], 'disk full')]
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, failure in failures:
        groups.setdefault(kind(failure), []).append((name, failure))
    return [
        ([name for name, _ in group], group[0][1] if len({failure for _, failure in group}) == 1 else what)
        for what, group in groups.items()
    ]


def kind(failure: str) -> str:
    """A failure without the client numbers in it, which differ between runs with the same cause.

    >>> kind("Rejected: client 3: x is not finite")
    'Rejected: a client: x is not finite'
    """
    return re.sub(r"\bclient \d+", "a client", re.sub(r" \(\d[\d, …]*\)", "", failure))
