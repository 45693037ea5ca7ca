"""The check that every network makes of its sizes."""

from __future__ import annotations


def check_sizes(network: str, **sizes: int) -> None:
    """Refuse a size that is not a whole number above zero."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{network}: {name} must be a whole number above 0, not {size!r}")
