"""Reads untrusted files: never blocks on a pipe, and never uses more memory than a valid file needs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 26
"""Bytes; a record with a reason for each of 100,000 clients is shorter."""


def at_home(path: str | Path) -> Path:
    """A path with ~ expanded to the home folder, which may not exist, as in a container with an arbitrary user id."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        reason = "~ cannot be expanded, as there is no home folder; write the full path"
        raise FileNotFoundError(errno.ENOENT, reason, str(path)) from error


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading; raises `OSError` for a pipe or a device, which might block forever."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe, a device or a folder, not a file", str(path))
    return file


def read_file(path: Path, largest: int) -> bytes:
    """The content of a regular file; raises `OSError` if it has more than `largest` bytes."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            reason = f"it has {size:,} bytes, but such a file has at most {largest:,}"
            raise OSError(errno.EINVAL, reason, str(path))
        return file.read(size)


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file without line breaks, up to the first incomplete line or one longer than `LONGEST_LINE`."""
    while (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
        yield line[:-1]
