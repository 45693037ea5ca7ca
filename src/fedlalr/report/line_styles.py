"""The colour and the dashes of every line, the same in a comparison's figure and on a report's page."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from fedlalr.common.colours import COLOURS
from fedlalr.report.tables import NAMES

DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (3.5, 1.5),
    (6.5, 1.5, 1, 1.5),
    (1, 1.5),
    (5, 1, 1, 1, 1, 1),
    (8, 2),
    (1, 3),
    (3, 3),
)
"""Lengths on and off, in widths of the line; none for a solid one."""
LINE_STYLES: tuple[Any, ...] = tuple((0, lengths) if lengths else "-" for lengths in DASHES)
"""The same as matplotlib has them."""
MOST_LOOKS = len(COLOURS) * len(DASHES)


class Look(NamedTuple):
    """Places in `COLOURS` and `DASHES`."""

    colour: int
    dash: int

    @property
    def matplotlib(self) -> dict[str, Any]:
        return {"color": COLOURS[self.colour], "linestyle": LINE_STYLES[self.dash]}


def looks_of(methods: Sequence[str]) -> list[Look]:
    """A look for each line, of which the method is given as papers write it; no two are alike up to `MOST_LOOKS`.

    A method's first line depends on nothing but which methods there are; its others have the same colour, as long as
    there are dashes left. Lines of one method alone differ in colour first.

    >>> looks_of(["FedAvg", "FedLALR", "FedAvg"])
    [Look(colour=1, dash=1), Look(colour=0, dash=0), Look(colour=1, dash=2)]
    >>> looks_of(["FedAvg", "FedAvg"])
    [Look(colour=0, dash=0), Look(colour=1, dash=1)]
    """
    known = list(NAMES.values())
    ranked = sorted(set(methods), key=lambda method: (known.index(method) if method in known else len(known), method))
    ranks = [ranked.index(method) for method in methods]
    firsts = {method: i for i, method in reversed(list(enumerate(methods)))}.values()
    found: dict[int, int] = {}
    for i in [*sorted(firsts), *(i for i in range(len(methods)) if i not in firsts)]:
        of_the_colour = range(ranks[i], ranks[i] + MOST_LOOKS, len(COLOURS)) if len(ranked) > 1 else ()
        free = (k % MOST_LOOKS for k in chain(of_the_colour, range(MOST_LOOKS)) if k % MOST_LOOKS not in found.values())
        found[i] = next(free, i % MOST_LOOKS)
    return [_numbered(found[i]) for i in range(len(methods))]


def dash_arrays(width: float) -> list[str]:
    """`DASHES` as SVG writes them, for lines of a width."""
    return [" ".join(f"{width * length:g}" for length in dashes) for dashes in DASHES]


def _numbered(k: int) -> Look:
    """All looks in an order: every colour once, each with its dashes, then all again with the next dashes."""
    return Look(k % len(COLOURS), (k + k // len(COLOURS)) % len(DASHES))
