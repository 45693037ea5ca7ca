"""The error for invalid configurations, and helpers for its message."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_SHOWN = 200
"""Characters."""


class ConfigError(ValueError):
    """An invalid configuration. The message says what was given, what is allowed, and suggests similar names."""


def shortened(text: str) -> str:
    """Text from the user, truncated for an error message.

    >>> len(shortened("9" * 1_000_000))
    201
    """
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def listed(choices: Sequence[str]) -> str:
    return ", ".join(choices) if choices else "none"
