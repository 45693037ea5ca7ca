"""Atomic file writes: complete or not at all, even if the process dies or the disk is full."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yield a place beside `path` to write to, then flush it to the disk and rename it: `path` is old or new, never
    half. After an error the old file is still there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")  # two processes may write the same file
    try:
        yield aside
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a whole file or, on `OSError`, nothing."""
    with written_aside(path) as aside:
        aside.write_bytes(content.encode() if isinstance(content, str) else content)


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file of these parts, one after another, and flush it to disk."""
    with path.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_file_name(text: str) -> str:
    """Turn any text into one component of a path.

    >>> as_file_name("paper,lr=0.1"), as_file_name("../../away")
    ('paper-lr-0.1', '.._.._away')
    """
    return re.sub(r"[^\w.+-]+", "_", re.sub(r"[,=]", "-", text))
