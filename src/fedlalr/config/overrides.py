"""Changes to a configuration: `key=value` on the command line, or a file's settings on top of a preset's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from fedlalr.config import yaml_file
from fedlalr.config.errors import ConfigError, shortened
from fedlalr.config.own import is_own

Tree = dict[str, Any]

SHORT = {"algorithm": "name", "model": "name", "data": "name", "partition": "scheme", "schedule": "name"}
"""Sections that may be given as one word, and the key of that word."""

_LOG = ("start", "base", "unit")
_FAMILIES = {"local": {"epochs": ("epochs",), "steps": ("steps",), "start": _LOG, "base": _LOG}}
"""Keys that exclude others of their section, and the keys that remain when one is set."""


def parse_overrides(texts: Iterable[str]) -> Tree:
    """Overrides as a nested table; their order does not matter.

    >>> parse_overrides(["algorithm.lr=3e-2", "algorithm=fedadam", "rounds=20"])
    {'algorithm': {'lr': 0.03, 'name': 'fedadam'}, 'rounds': 20}
    """
    tree: Tree = {}
    for text in texts:
        key, equals, value = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            raise ConfigError(f"{text!r} is not an override; write key=value, such as rounds=20 or partition.alpha=0.1")
        if len(parts) == 1 and parts[0] in SHORT and not value.lstrip().startswith("{"):
            parts.append(SHORT[parts[0]])
        _put(tree, parts, _value(text, value), text)
    return tree


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Tree:
    """The base with the changes applied. Another algorithm, model or data set drops the options of the old one."""
    merged = dict(base)
    for key, change in changes.items():
        old = expand(key, merged.get(key))
        new = expand(key, change)
        if not isinstance(old, Mapping) or not isinstance(new, Mapping):
            merged[key] = new
            continue
        if SHORT.get(key) == "name" and new.get("name", old.get("name")) != old.get("name"):
            old = {}
        for name, family in _FAMILIES.get(key, {}).items():
            if new.get(name) is not None:
                old = {other: value for other, value in old.items() if other in family}
        merged[key] = merge(old, new)
    if has_own_data(changes) and "partition" not in changes:
        merged.pop("partition", None)  # its function makes the clients
    _follow_methods(merged, changes)
    return merged


def expand(section: str, value: Any) -> Any:
    """Expand a section given as one word to a table."""
    return {SHORT[section]: value} if section in SHORT and isinstance(value, str) else value


def flat(tree: Mapping[str, Any], prefix: str = "") -> Tree:
    """All settings in a nested table by their full names.

    >>> flat({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    found: Tree = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found


def has_own_data(tree: Mapping[str, Any]) -> bool:
    """Whether nested settings name a function that makes the clients."""
    data = expand("data", tree.get("data"))
    return isinstance(data, Mapping) and is_own(str(data.get("name", "")))


def _follow_methods(merged: Tree, changes: Mapping[str, Any]) -> None:
    """Apply a change to `methods.NAME` to an algorithm section that already contains that method's settings."""
    algorithm, methods = merged.get("algorithm"), changes.get("methods")
    if not isinstance(algorithm, Mapping) or not isinstance(methods, Mapping) or "algorithm" in changes:
        return
    settings = methods.get(str(algorithm.get("name")))
    if isinstance(settings, Mapping):
        merged["algorithm"] = {**algorithm, **{name: v for name, v in settings.items() if name in algorithm}}


def _value(text: str, value: str) -> Any:
    if value.lstrip().startswith("*"):
        return value.strip()  # a pattern such as *.bias; YAML would read an alias, of which there are none
    try:
        return yaml_file.parse(value)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter two: huge numbers, deep nesting
        raise ConfigError(f"the value of {shortened(text)!r} cannot be read: {error}") from error


def _put(tree: Tree, parts: list[str], value: Any, text: str) -> None:
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{text!r} contradicts another override: {part!r} was given as one value")
    if parts[-1] in tree:
        raise ConfigError(f"{'.'.join(parts)!r} is given twice; remove one")
    tree[parts[-1]] = value
