"""The error for invalid configurations, and helpers for its message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fedlalr.data.fetch import DataCorrupt

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


@contextmanager
def as_config_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Raise errors of these kinds as `ConfigError`, except `DataCorrupt`, for which the data is to blame."""
    try:
        yield
    except DataCorrupt:
        raise
    except kinds as error:
        raise ConfigError(str(error)) from error


def listed(choices: Iterable[str]) -> str:
    return ", ".join(choices) or "none"
