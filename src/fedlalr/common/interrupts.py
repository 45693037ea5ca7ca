"""Ctrl-C and SIGTERM, as the command and the processes it starts treat them. Imported before torch, so it is small."""

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
"""SIGTERM is what `docker stop`, Slurm and Kubernetes send before they kill."""


def exit_quietly_during_imports() -> None:
    """Where this process is the command, end it without a traceback when a signal comes before the command runs."""
    if sys.orig_argv[1:3] == ["-m", "fedlalr"] or Path(sys.argv[0]).stem == "fedlalr":
        for number in _BOTH:
            if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
                signal.signal(number, lambda received, _: os._exit(128 + received))


@contextmanager
def terminable() -> Iterator[list[int]]:
    """Let Ctrl-C and SIGTERM raise `KeyboardInterrupt`. Gives the signals that came, for the exit code."""
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield received
        return
    before = {number: signal.getsignal(number) for number in _BOTH}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as a shell has it for jobs in the background
            signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def blocked() -> Iterator[None]:
    """Start processes that neither Ctrl-C nor SIGTERM reaches, which may go to a whole group but are for the parent.

    The parent receives afterwards what arrives meanwhile.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BOTH)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent(descriptor: int) -> None:
    """End this process at once when the other end of a socket is closed, whatever it is doing."""

    def watch() -> None:
        hung_up = select.poll()
        hung_up.register(descriptor, 0)  # nothing is waited for but the end
        hung_up.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
