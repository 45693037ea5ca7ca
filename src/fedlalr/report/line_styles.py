"""The colour and dash pattern of every line, the same in a comparison's figure and in a report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from fedlalr.algorithms.registry import PAPER_METHODS
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
"""Lengths on and off, in line widths; empty for a solid line."""
LINE_STYLES: tuple[Any, ...] = tuple((0, lengths) if lengths else "-" for lengths in DASHES)
"""The same for matplotlib."""
MOST_LOOKS = len(COLOURS) * len(DASHES)


class Look(NamedTuple):
    """Indices into `COLOURS` and `DASHES`."""

    colour: int
    dash: int

    @property
    def matplotlib(self) -> dict[str, Any]:
        return {"color": COLOURS[self.colour], "linestyle": LINE_STYLES[self.dash]}


_FIRST = (*PAPER_METHODS, "alignedlalr", "fedadamw", "fedavgm", "diloco")
_ORDER = [NAMES[name] for name in (*_FIRST, "localadam")]
_ORDER += [name for name in NAMES.values() if name not in _ORDER]
"""The first ten methods have colours of their own, the others share them with other dashes: local Adam and those after
it that of FedLALR, FedAvg and so on."""


def look_of(method: str) -> Look:
    """The look of a method, as written in papers: the same in every figure.

    >>> look_of("FedLALR"), look_of("AlignedLALR"), look_of("DiLoCo") == look_of("FedLALR")
    (Look(colour=0, dash=0), Look(colour=6, dash=6), False)
    """
    return _numbered(_ORDER.index(method))


def looks_of(methods: Sequence[str]) -> list[Look]:
    """A look for each line, given its method as written in papers; distinct for up to `MOST_LOOKS` lines.

    A method's first line without compression is always the same; its other lines have the same colour, as long as there
    are dash patterns left. If there is only one method, lines differ in colour first. Methods of your own come after
    the known ones.

    >>> looks_of(["FedAvg", "FedLALR", "FedAvg"])
    [Look(colour=1, dash=1), Look(colour=0, dash=0), Look(colour=1, dash=4)]
    >>> looks_of(["FedAvg", "FedAvg"])
    [Look(colour=1, dash=1), Look(colour=0, dash=0)]
    >>> looks_of(["FedAvg (balanced)", "FedAvg", "FedLALR"])
    [Look(colour=1, dash=4), Look(colour=1, dash=1), Look(colour=0, dash=0)]
    """
    names = [_uncompressed(method) for method in methods]
    ranks = _ranks(names)
    plain_last = sorted(range(len(methods)), key=lambda i: (methods[i] == names[i], -i))
    firsts = {names[i]: i for i in plain_last}.values()
    found: dict[int, int] = {}
    several = len(set(names)) > 1
    for i in [*sorted(firsts), *(i for i in range(len(methods)) if i not in firsts)]:
        of_the_colour = range(ranks[i], ranks[i] + (MOST_LOOKS if several else 1), len(COLOURS))
        free = (k % MOST_LOOKS for k in chain(of_the_colour, range(MOST_LOOKS)) if k % MOST_LOOKS not in found.values())
        found[i] = next(free, i % MOST_LOOKS)
    return [_numbered(found[i]) for i in range(len(methods))]


def in_order(methods: Sequence[str]) -> list[int]:
    """The order of some lines in a legend: by method, as the looks are, each first without compression.

    >>> in_order(["mine", "FedAvg (balanced)", "FedAvg", "FedLALR"])
    [3, 2, 1, 0]
    """
    names = [_uncompressed(method) for method in methods]
    ranks = _ranks(names)
    return sorted(range(len(methods)), key=lambda i: (ranks[i], methods[i] != names[i]))


def _uncompressed(method: str) -> str:
    return method.partition(" (")[0]


def _ranks(names: Sequence[str]) -> list[int]:
    ranked = [*_ORDER, *sorted(set(names) - set(_ORDER))]
    return [ranked.index(name) for name in names]


def dash_arrays(width: float) -> list[str]:
    """`DASHES` in SVG's notation, for a line width."""
    return [" ".join(f"{width * length:g}" for length in dashes) for dashes in DASHES]


def _numbered(k: int) -> Look:
    """All looks in order: every colour once, each with its own dashes, then all colours with the next dashes."""
    return Look(k % len(COLOURS), (k + k // len(COLOURS)) % len(DASHES))
