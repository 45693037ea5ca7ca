"""What is said when a configuration cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_SHOWN = 200
"""Characters."""


class ConfigError(ValueError):
    """A configuration that cannot be run. The message says what was given, what is allowed and what is near."""


def shortened(text: str) -> str:
    """As much of what was given as an error repeats.

    >>> len(shortened("9" * 1_000_000))
    201
    """
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def listed(choices: Sequence[str]) -> str:
    return ", ".join(choices) if choices else "none"
