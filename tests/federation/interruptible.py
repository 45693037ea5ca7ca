"""The environment of a process that a test sends signals to."""

from __future__ import annotations

import os


def interruptible(**changes: str) -> dict[str, str]:
    """This environment with one thread and without measuring coverage.

    An interrupt that arrives while coverage holds its lock leaves the lock held, and the process waits for it forever.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
    return kept | {"OMP_NUM_THREADS": "1"} | changes
