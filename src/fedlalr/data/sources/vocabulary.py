"""LEAF's 80 characters, and the replacements for others."""

from __future__ import annotations

import string
import unicodedata
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedlalr.data.fetch import DataCorrupt

CHARACTERS: Final = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""The vocabulary in the order of its codes, 0 to 79."""

_UNKNOWN: Final = 255
_CODES: Final = np.full(128, _UNKNOWN, dtype=np.uint8)
_CODES[[ord(character) for character in CHARACTERS]] = np.arange(len(CHARACTERS))

_MARKS: Final = {"{": "[", "/": ",", "_": "", "@": "", "`": "'"}
"""Errors and marks in the Gutenberg transcriptions."""
_QUOTES: Final = {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}
_SIGNS: Final = {"\ufeff": "", "\t": " ", "\u00a0": " ", "\u2013": "-", "\u2014": "--", "\u2026": "..."}
_LIGATURES: Final = {"\u00e6": "ae", "\u00c6": "Ae", "\u0153": "oe", "\u0152": "Oe"}
"""Typography of later editions."""
_REPLACED: Final = str.maketrans(_MARKS | _QUOTES | _SIGNS | _LIGATURES)


def normalise(text: str) -> str:
    """Replace the characters outside the 80 that are known from editions of Shakespeare, and drop accents.

    >>> normalise("{Aside.] Ay, “tremor cordis” — Orléans")
    '[Aside.] Ay, "tremor cordis" -- Orleans'
    """
    text = text.translate(_REPLACED)
    if text.isascii():
        return text
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def encode(text: str, where: str) -> NDArray[np.uint8]:
    """The codes of a text. A character outside the vocabulary is an error that names its position.

    >>> encode("Ay!", "a test").tolist()
    [25, 77, 2]
    """
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    codes = _CODES[np.minimum(points, 127)]
    codes[points > 127] = _UNKNOWN
    wrong = np.flatnonzero(codes == _UNKNOWN)
    if len(wrong):
        place = int(wrong[0])
        raise DataCorrupt(
            f"{where}, character {place + 1}: {text[place]!r} (U+{ord(text[place]):04X}) is not one of LEAF's 80"
        )
    return codes
