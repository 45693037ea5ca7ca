"""Error messages for users, and exit codes.

0    success
1    a run failed: too few usable replies, a non-finite state, a full disk, a dead process
2    invalid command, setting or file
3    data set not found, or corrupt
130  interrupted with Ctrl-C
143  terminated by SIGTERM
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from fedlalr.common.interrupts import terminable
from fedlalr.common.printable import complain
from fedlalr.config import ConfigError
from fedlalr.config.jobs import ProcessDied
from fedlalr.data.sources import DataCorrupt, DataNotFound
from fedlalr.federation import RoundFailed
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.training.engines.workers import WorkerDied
from fedlalr.training.ranks import RankFailed

FAILED, USAGE, NO_DATA = 1, 2, 3
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a valid path that cannot be written or read at the moment."""


class InterruptShown(KeyboardInterrupt):
    """An interrupt that a command has already reported."""


@contextmanager
def hint_to_repeat() -> Iterator[None]:
    """On an interrupt, say that repeating the command resumes its runs."""
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted; repeat the command to resume")
        raise InterruptShown from None


class Commands(TyperGroup):
    """Turns the library's errors into a message and an exit code; programming errors pass through."""

    def invoke(self, ctx: Any) -> Any:
        with terminable() as received:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as interrupt:
                if not isinstance(interrupt, InterruptShown):
                    complain("interrupted")
                raise typer.Exit(128 + (received or [signal.SIGINT])[0]) from None
            except Exception as error:
                code = exit_code(error)
                if code is None:
                    raise
                complain(f"error: {message_of(error)}")
                raise typer.Exit(code) from error


def exit_code(error: Exception) -> int | None:
    """The exit code for an error of the library; None for a programming error."""
    if isinstance(error, DataNotFound | DataCorrupt):
        return NO_DATA
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, RoundFailed | RunDirectoryError | RankFailed | WorkerDied | ProcessDied):
        return FAILED
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return FAILED
    if isinstance(error, OSError) and error.filename is not None:
        return USAGE
    return None


def message_of(error: Exception) -> str:
    """The error message; for errors of the operating system with the file, if known."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    if error.errno in _DISK_ERRORS:
        where = "" if error.filename is None else f" ({error.filename})"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        verb, fix = ("written", "free disk space") if full else ("used", "fix the problem")
        return f"a file cannot be {verb}{where}: {error.strerror}; {fix}, then repeat the command to resume"
    return f"{error.filename} cannot be used: {error.strerror}"
