"""Terminals: whether there is one, text from outside that is safe to print there, and lines on standard error."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    r"""A text with its control characters escaped: names and clients' errors may contain terminal codes.

    >>> print(printable("\x1b[2J"))
    \x1b[2J
    """
    return text.translate(_CONTROL)


def has_terminal() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def complain(message: str) -> None:
    """Print a line to standard error."""
    print(printable(message), file=sys.stderr)


@contextmanager
def plain_warnings(run: object = None) -> Iterator[None]:
    """Show warnings as plain lines, without their place in the code, and name the run that they are about if given."""
    start = "warning: " if run is None else f"warning: {run}: "
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: complain(f"{start}{message}")
        yield
