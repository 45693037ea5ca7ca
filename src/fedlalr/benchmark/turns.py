"""The contestant's side of a race: reports that it is ready, runs a round on request, reports its time.

Imports only the standard library, so that other libraries' environments can use it without this one. A library's own
output is redirected to standard error; standard output carries the protocol, one line at a time.
"""

from __future__ import annotations

import os
import sys
import time


class Turns:
    """Call `ready` before the first round and `lap` after every round; both wait for the next turn."""

    def __init__(self) -> None:
        self._tell = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._began = 0.0

    def ready(self) -> None:
        self._tell.write("ready\n")
        self._wait()

    def lap(self) -> None:
        seconds = time.perf_counter() - self._began
        self._tell.write(f"{seconds}\n")
        self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)  # the race is over, in the middle of the caller's loop
        self._began = time.perf_counter()
