"""Files that are there as a whole or not at all, whenever the process dies or the disk is full."""

from __future__ import annotations

import os
from pathlib import Path

from fedlalr.federation.tensor_file import write_bytes


def write_whole(path: Path, text: str) -> None:
    """Write a text aside, flush it to the disk and rename it; on `OSError` the file that was there stands."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.writing")  # two processes may write the same file
    try:
        write_bytes(aside, text.encode())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
