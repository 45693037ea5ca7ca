"""Errors as people should see them, and the exit code of each.

0    done
1    a run failed: too few usable replies, a state that is no longer finite, a disk that is full, a process that died
2    the command, a setting or a file cannot be used
3    a data set is not there, or damaged
130  interrupted with Ctrl-C
143  terminated by SIGTERM
"""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from fedlalr.common.interrupts import terminable
from fedlalr.common.printable import printable

FAILED, USAGE, NO_DATA = 1, 2, 3
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What the operating system says when a file could be used, but not now."""


class InterruptTold(KeyboardInterrupt):
    """An interrupt that a command has already told of."""


@contextmanager
def told_how_to_go_on() -> Iterator[None]:
    """Say of several runs that were interrupted that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted; the same command goes on from here")
        raise InterruptTold from None


class Commands(TyperGroup):
    """The commands; turns the library's errors into a message and an exit code, and lets programming errors through."""

    def invoke(self, ctx: Any) -> Any:
        with terminable() as received:
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as interrupt:
                if not isinstance(interrupt, InterruptTold):
                    complain("interrupted")
                raise typer.Exit(128 + (received or [signal.SIGINT])[0]) from None
            except Exception as error:
                code = exit_code(error)
                if code is None:
                    raise
                complain(f"error: {told(error)}")
                raise typer.Exit(code) from error


def exit_code(error: Exception) -> int | None:
    """The exit code that an error of the library stands for; None for what should not have happened."""
    from fedlalr.config import ConfigError
    from fedlalr.config.jobs import ProcessDied
    from fedlalr.data.sources import DataCorrupt, DataNotFound
    from fedlalr.federation import RoundFailed
    from fedlalr.federation.storage.journal import RunDirectoryError
    from fedlalr.training.engines.workers import WorkerDied
    from fedlalr.training.ranks import RankFailed

    if isinstance(error, DataNotFound | DataCorrupt):
        return NO_DATA
    if isinstance(error, ConfigError):
        return USAGE
    if isinstance(error, RoundFailed | RunDirectoryError | RankFailed | WorkerDied | ProcessDied):
        return FAILED
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        return FAILED
    if isinstance(error, OSError) and error.filename is not None:
        return USAGE
    return None


def told(error: Exception) -> str:
    """An error in words; of the operating system's, which file it is about, where that is known."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    if error.errno in _OF_THE_DISK:
        where = "" if error.filename is None else f" ({error.filename})"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        verb, mend = ("written", "make room") if full else ("used", "mend the cause")
        return f"a file cannot be {verb}{where}: {error.strerror}; {mend}, then the same command goes on from here"
    return f"{error.filename} cannot be used: {error.strerror}"


def complain(message: str) -> None:
    """A line on standard error, which carries nothing else."""
    print(printable(message), file=sys.stderr)
