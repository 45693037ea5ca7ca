"""`--vary KEY=A,B`: one comparison for every combination of the values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from fedlalr.config.errors import ConfigError, shortened
from fedlalr.config.yaml_file import parse


@dataclass(frozen=True)
class Variation:
    """One combination of settings."""

    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """Its name in titles; empty without variation."""
        return ",".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.settings.items()
        ).replace("/", "_")

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.settings.items()]


def parse_variations(texts: Sequence[str]) -> list[Variation]:
    """All combinations of the values; a single variation without changes if none are given.

    >>> [variation.label for variation in parse_variations(["rounds=5,9", "partition=iid,shards"])]
    ['rounds=5,partition=iid', 'rounds=5,partition=shards', 'rounds=9,partition=iid', 'rounds=9,partition=shards']
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        key, values = _axis(text)
        if key in axes:
            raise _unusable(text, f"{key} is varied twice; give all its values in one --vary")
        axes[key] = values
    return [Variation(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def _axis(text: str) -> tuple[str, list[Any]]:
    key, equals, written = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise _unusable(text, "write KEY=A,B, such as partition.alpha=0.1,0.6")
    if key == "seed":
        raise _unusable(text, "vary the seed with --seeds")
    try:
        values = parse(written if written.lstrip().startswith("[") else f"[{written}]")
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter two: huge numbers, deep nesting
        raise _unusable(text, f"its values cannot be read: {error}") from error
    if not isinstance(values, list) or not values or None in values:
        raise _unusable(text, "separate the values with commas, such as partition.alpha=0.1,0.6")
    if any(values.count(value) > 1 for value in values):
        raise _unusable(text, "a value is given twice")
    return key, values


def _unusable(text: str, why: str) -> Exception:
    return ConfigError(f"--vary {shortened(text)!r} cannot be used: {why}")
