"""Overrides in tests."""

from collections.abc import Sequence


def replaced(base: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Base overrides with some of them changed and others added."""
    return list({text.partition("=")[0]: text for text in [*base, *changes]}.values())
