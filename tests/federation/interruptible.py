"""The environment of a process that a test sends signals to."""

from __future__ import annotations

import os


def interruptible(**changes: str) -> dict[str, str]:
    """This environment with one thread."""
    return os.environ | {"OMP_NUM_THREADS": "1"} | changes
