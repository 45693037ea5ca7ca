"""A text by roles: its characters, its pieces, and the role of each piece.

Every source of Shakespeare is read into this structure: plays, where a role's speeches are joined into one piece of
text, and LEAF's overlapping windows, from which the original text is reassembled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedlalr.data.fetch import DataCorrupt
from fedlalr.data.sources import vocabulary
from fedlalr.data.sources.rawdata import Arrays

LENGTH: Final = 80
"""Characters in a window; the one after it is the label."""
_PARTS: Final = ("characters", "pieces", "owners", "names")


@dataclass(frozen=True)
class Roles:
    """The characters of all roles, one role after another.

    Piece j of the text is `characters[pieces[j]:pieces[j + 1]]`, spoken by role `owners[j]`.
    """

    characters: NDArray[np.uint8]
    pieces: NDArray[np.int64]
    owners: NDArray[np.int64]
    names: tuple[str, ...]

    @classmethod
    def of(cls, texts: Mapping[str, Iterable[str]], where: str) -> Roles:
        """From the pieces of text of every role."""
        codes: list[NDArray[np.uint8]] = []
        owners: list[int] = []
        for role, (name, pieces) in enumerate(texts.items()):
            for piece in pieces:
                codes.append(vocabulary.encode(piece, f"{where}, role {name}"))
                owners.append(role)
        ends = np.cumsum([0, *map(len, codes)], dtype=np.int64)
        joined = np.concatenate(codes) if codes else np.empty(0, np.uint8)
        return cls(joined, ends, np.array(owners, dtype=np.int64), tuple(texts))

    @property
    def windows(self) -> NDArray[np.int64]:
        """The number of windows of every role."""
        each = np.maximum(np.diff(self.pieces) - LENGTH, 0)
        return np.bincount(self.owners, weights=each, minlength=len(self.names)).astype(np.int64)

    def starts(self, role: int) -> NDArray[np.int64]:
        """The starts of a role's windows, in spoken order. A window never crosses pieces."""
        mine = np.flatnonzero(self.owners == role)
        return np.concatenate(
            [np.empty(0, np.int64), *(np.arange(self.pieces[j], self.pieces[j + 1] - LENGTH) for j in mine)]
        ).astype(np.int64)


@dataclass(frozen=True)
class Script:
    """A text to cut into windows: unsplit, or with the test part that came with it."""

    edition: str
    roles: Roles
    test: Roles | None = None

    def arrays(self) -> Arrays:
        """As plain arrays, for the cache."""
        found: dict[str, NDArray[Any]] = {"edition": _bytes(self.edition)}
        for part, roles in (("", self.roles), ("test_", self.test)):
            if roles is not None:
                found |= {part + name: getattr(roles, name) for name in _PARTS[:-1]}
                found[f"{part}names"] = _bytes(json.dumps(roles.names))
        return found

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Script:
        """The inverse of `arrays`."""
        parts = []
        for part in ("", "test_"):
            if f"{part}characters" in arrays:
                characters, pieces, owners, names = (arrays[part + name] for name in _PARTS)
                parts.append(Roles(characters, pieces, owners, tuple(json.loads(names.tobytes()))))
        return cls(arrays["edition"].tobytes().decode(), *parts)


def lay_together(rows: Iterable[tuple[str, str, str]], where: str) -> dict[str, list[str]]:
    """The text that windows of stride 1 were cut from: (role, window, next character) in time order within a role.

    A window that does not continue the previous one starts a new piece of text.

    >>> x = "a" * 78
    >>> lay_together([("HAM", "T" + x + "b", "c"), ("HAM", x + "bc", "d"), ("KING", "Q" + x + "e", "f")], "a test") == {
    ...     "HAM": ["T" + x + "bcd"], "KING": ["Q" + x + "ef"]}
    True
    """
    texts: dict[str, list[list[str]]] = {}
    expected: dict[str, str] = {}
    for number, (role, window, following) in enumerate(rows, start=1):
        if len(window) != LENGTH or len(following) != 1:
            raise DataCorrupt(
                f"{where}, row {number}: a window of {len(window)} characters with a label of {len(following)}; "
                f"there must be {LENGTH} and 1"
            )
        if expected.get(role) == window:
            texts[role][-1].append(following)
        else:
            texts.setdefault(role, []).append([window, following])
        expected[role] = window[1:] + following
    return {role: ["".join(piece) for piece in pieces] for role, pieces in texts.items()}


def _bytes(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(text.encode(), dtype=np.uint8)
