"""Roles and their lines, parsed from the plain text of Project Gutenberg's single plays.

In these texts a speech is a heading with the speaker's name, on a line of its own ("HAMLET." or "Ham."), and the lines
below it. Stage directions are in brackets. Directions on lines of their own are dropped; those within a spoken line are
kept.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final, NamedTuple

from fedlalr.data.fetch import DataCorrupt
from fedlalr.data.sources import vocabulary

_PART: Final = re.compile(
    r"(?:THE )?(?:PROLOGUE|INDUCTION|EPILOGUE|END|DUMB SHOW)\b\.?$|THE ORDER OF THE CORONATION"
    r"|A(?:CT|ct) (?:[IVX]+|\d|FIRST|SECOND|THIRD|FOURTH|FIFTH)\b|S(?:CENE|cene)\b"
)
_PERSON: Final = ("PROLOGUE", "EPILOGUE")
_SCENE: Final = re.compile(r"S(?:CENE|cene)\b")
_UPPER: Final = re.compile(
    r"(?:\d\.? |A |M\. |MRS\. )?[A-Z][A-Z'-]+(?:(?:,? and |,? & |,? |\. )(?:[A-Z][A-Z'-]*|&[cC])\.?)*"
)
_MIXED: Final = re.compile(r"(?:\d |P\. )?[A-Z][a-z]+\.?(?: (?:and|[A-Z][a-z]+\.?))*")
_LONGEST_LINE: Final = 60  # the end of a heading with a direction


class SpokenLine(NamedTuple):
    """A spoken line and its number in the file."""

    number: int
    text: str


def speeches(text: str, where: str) -> dict[str, list[SpokenLine]]:
    """The spoken lines of every role of a play, in the order of the play. Roles have the names of the headings.

    >>> text = "ACT I.\\n\\n[Enter two.]\\n\\nBERNARDO.\\nWho's there?\\n\\nFRANCISCO.\\nNay, answer me.\\n"
    >>> play = speeches(text, "a test")
    >>> {role: [line.text for line in lines] for role, lines in play.items()}
    {'BERNARDO': ["Who's there?"], 'FRANCISCO': ['Nay, answer me.']}
    """
    lines = [vocabulary.normalise(line).rstrip() for line in text.splitlines()]
    first = next((i for i, line in enumerate(lines) if _PART.match(line) and not _SCENE.match(line)), None)
    if first is None:
        raise DataCorrupt(f"{where} is not a play: it has no heading such as 'ACT I.'")
    found = _Reader(lines, first).read()
    if not found:
        raise DataCorrupt(f"{where} has no speaker: a name on a line of its own, such as 'HAMLET.', above every speech")
    return found


def joined(lines: list[SpokenLine]) -> str:
    """A role's lines as one text: joined by spaces, with runs of spaces collapsed.

    >>> joined([SpokenLine(1, "  Ay,"), SpokenLine(2, "there's  the rub.")])
    "Ay, there's the rub."
    """
    return re.sub(r"\s+", " ", " ".join(line.text for line in lines)).strip()


class _Reader:
    """One pass over the lines of a play; remembers who is speaking."""

    def __init__(self, lines: list[str], first: int) -> None:
        self.lines, self.place = lines, first
        self.names = _names(lines, first)
        longest_first = sorted(self.names, key=len, reverse=True)
        self.named = re.compile(f"(?:{'|'.join(map(re.escape, longest_first))})(?=\\.|$| \\[)")
        self.spoken: dict[str, list[SpokenLine]] = {}
        self.speaker: str | None = None
        self.fresh = True  # at the beginning of a paragraph, where headings are

    def read(self) -> dict[str, list[SpokenLine]]:
        while self.place < len(self.lines):
            line = self.lines[self.place]
            if not line or line.strip(" .") == "SONG":
                self.place, self.fresh = self.place + 1, True
            elif self.fresh and _PART.match(line) and not self._speaks(line):
                self.speaker = None
                self._skip_part(line)
            elif line.startswith("["):
                self._direction()
            elif (heading := self._heading(line)) is not None:
                self.speaker, rest = heading
                self.lines[self.place], self.fresh = rest, False
                if not rest:
                    self.place += 1
            else:
                self._say(self.place, line)
                self.place, self.fresh = self.place + 1, False
        return {role: lines for role, lines in self.spoken.items() if lines}

    def _say(self, place: int, text: str) -> None:
        if self.speaker is not None:
            self.spoken.setdefault(self.speaker, []).append(SpokenLine(place + 1, text))

    def _speaks(self, line: str) -> bool:
        """A prologue may be a person, as in the play within the Dream: then the speech follows directly."""
        below = self.lines[self.place + 1] if self.place + 1 < len(self.lines) else ""
        return line.rstrip(".") in _PERSON and bool(below) and not below.startswith("[")

    def _skip_part(self, line: str) -> None:
        """An act is one line; a scene's heading may run over several."""
        self.place += 1
        if _SCENE.match(line):
            while self.place < len(self.lines) and self.lines[self.place]:
                self.place += 1
        self.fresh = True

    def _direction(self) -> None:
        """Drop a direction that fills its lines; keep one that is followed by speech."""
        end, depth = self.place, 0
        while True:
            after, depth = _after_direction(self.lines[end], depth)
            if depth == 0 or end + 1 == len(self.lines) or not self.lines[end + 1]:
                break
            end += 1
        speech = depth == 0 and re.search(r"\w", after) is not None
        if speech:
            for number in range(self.place, end + 1):
                self._say(number, self.lines[number])
        self.place, self.fresh = end + 1, not speech

    def _heading(self, line: str) -> tuple[str, str] | None:
        """(role, what follows on the line) if a line names a speaker."""
        if self.fresh and line.endswith(".") and line[:-1].upper() in self.names:
            return line[:-1].upper(), ""
        named = self.named.match(line)
        if named is None or not (self.fresh or named[0].isupper()):
            return None
        rest = line[named.end() :]
        if rest.startswith("."):
            rest = rest[1:].strip()
            return named[0].upper(), rest if re.search(r"\w", rest) else ""
        return (named[0].upper(), rest.strip()) if self.fresh else None


def _after_direction(line: str, depth: int) -> tuple[str, int]:
    """The text of a line outside brackets, and how many brackets are open at its end."""
    outside = []
    for character in line:
        if character == "[":
            depth += 1
        elif character in "]}" and depth:
            depth -= 1
        elif not depth:
            outside.append(character)
    return "".join(outside), depth


def _names(lines: list[str], first: int) -> frozenset[str]:
    """The names used as headings in a play, which are either all in capitals or not."""
    upper: Counter[str] = Counter()
    mixed: Counter[str] = Counter()
    for i in range(first, len(lines)):
        line, above = lines[i], lines[i - 1] if i > first else ""
        if len(line) > _LONGEST_LINE or not (not above or above.endswith("]") or _PART.match(above)):
            continue
        below = lines[i + 1] if i + 1 < len(lines) else ""
        heading = re.sub(r"\s*\[.*", "", line)
        name = heading.rstrip(".")
        if _PART.match(line) and name not in _PERSON:
            continue
        if _UPPER.fullmatch(name) and (heading.endswith(".") or below):
            upper[name] += 1
        elif _MIXED.fullmatch(line) and line.endswith(".") and below:
            mixed[name] += 1
    return frozenset(upper if upper.total() >= mixed.total() else mixed)
