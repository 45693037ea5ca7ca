"""Atomic file writes: complete or not at all, even if the process dies or the disk is full."""

from __future__ import annotations

import os
import re
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text to a temporary file, flush it to disk and rename it; on `OSError` the old file is kept."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")  # two processes may write the same file
    try:
        write_bytes(aside, text.encode())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and flush it to disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure, on platforms that can open folders."""
    if os.name == "posix":
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
