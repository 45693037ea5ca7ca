"""YAML as people expect it: `1e-3` is a number, `no` is a word, a duplicate key is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    """The core schema of YAML 1.2, which reads numbers like Python and JSON."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - as in the base class

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


for tag, pattern, first in (
    ("null", r"^(?:~|null|)$", ["~", "n", ""]),
    ("bool", r"^(?:true|false)$", list("tf")),
    ("int", r"^[-+]?(?:0|[1-9][0-9]*)$", list("-+0123456789")),
    ("float", r"^[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?$", list("-+.0123456789")),
    ("float", r"^(?:[-+]?\.inf|\.nan)$", list("-+.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), first)


def parse(text: str) -> Any:
    """The value of a YAML text.

    >>> parse("{lr: 1e-3, betas: [0.9, 0.99], server: no}")
    {'lr': 0.001, 'betas': [0.9, 0.99], 'server': 'no'}
    """
    return yaml.load(text, Loader=_Loader)


def dump(value: Any) -> str:
    """A value as YAML: keys in order, short lists and tables on one line."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
