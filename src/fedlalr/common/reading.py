"""Reading files that may be anything: never waits at a pipe, and never takes more memory than a real one needs."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

LONGEST_LINE = 1 << 26
"""Bytes; a record with a reason for each of 100,000 clients has less."""


def at_home(path: str | Path) -> Path:
    """A path with ~ as the home folder. There may be none, as in a container with a user id of its own."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        reason = "there is no home folder to put in the place of ~; write the path in full"
        raise FileNotFoundError(errno.ENOENT, reason, str(path)) from error


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read; `OSError` for a pipe or a device, which might never say anything."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe, a device or a folder, not a file", str(path))
    return file


def read_file(path: Path, largest: int) -> bytes:
    """The content of a regular file; `OSError` where it is larger than any real one."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > largest:
            reason = f"it has {size:,} bytes, and no file of its kind has more than {largest:,}"
            raise OSError(errno.EINVAL, reason, str(path))
        return file.read(size)


def whole_lines(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file without their ends, up to one that does not end or is longer than any real one."""
    while (line := file.readline(LONGEST_LINE)).endswith(b"\n"):
        yield line[:-1]
