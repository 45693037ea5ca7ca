"""The expected content of the files of data sets, from `checksums.toml`."""

from __future__ import annotations

import tomllib
from importlib import resources

from fedlalr.data.fetch import Fact

_TABLE = tomllib.loads((resources.files("fedlalr.data.sources") / "checksums.toml").read_text(encoding="utf-8"))


def facts(group: str) -> dict[str, Fact]:
    """File name → expected content."""
    return {name: Fact(size or None, kind, digest) for name, (size, kind, digest) in _TABLE[group].items()}
