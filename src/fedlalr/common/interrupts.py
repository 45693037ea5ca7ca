"""Handling of Ctrl-C and SIGTERM in the command and its processes. Imported before torch, so kept small."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_BOTH = (signal.SIGINT, signal.SIGTERM)
"""`docker stop`, Slurm and Kubernetes send SIGTERM before they kill."""


def exit_quietly_during_imports() -> None:
    """If this process is the command, exit without a traceback on a signal that arrives before the command runs."""
    if sys.orig_argv[1:3] == ["-m", "fedlalr"] or Path(sys.argv[0]).stem == "fedlalr":
        for number in _BOTH:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                signal.signal(number, lambda received, _: os._exit(128 + received))


@contextmanager
def terminable() -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM raise `KeyboardInterrupt`. Yields the received signals, for the exit code."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # handlers can only be set in the main thread
        yield received
        return
    before = {number: signal.getsignal(number) for number in _BOTH}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # set by shells for background jobs
            signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def blocked() -> Iterator[None]:
    """Block Ctrl-C and SIGTERM in processes started here: both may be sent to a whole group, but only the parent acts.

    The parent receives signals that arrive in the meantime afterwards.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BOTH)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(descriptor: int) -> None:
    """Exit immediately when the other end of a socket is closed, whatever this process is doing."""

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(descriptor, 0)  # only hang-ups are reported
        hung_up.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
