"""A real disk that a test can fill up or make read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def fill(path: Path, leave: int = 0) -> None:
    """Write a file until the disk has only this much space left."""
    with path.open("wb", buffering=0) as ballast:
        with suppress(OSError):
            while True:
                ballast.write(b"x" * 4096)
        ballast.truncate(ballast.tell() - leave)


@contextmanager
def small_disk(place: Path, *options: str) -> Iterator[Path]:
    """A disk in memory for the duration of a test, which is skipped if mounting one is not allowed."""
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
