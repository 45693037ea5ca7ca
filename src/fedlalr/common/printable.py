"""Terminals: whether there is one, and text from outside that is safe to print there."""

from __future__ import annotations

import sys

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
