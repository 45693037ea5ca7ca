"""The command line that makes a run again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from fedlalr.config import Config, ConfigError, load, presets
from fedlalr.config.overrides import SHORT
from fedlalr.config.yaml_file import parse

SECTIONS = ("data", "partition", "model", "algorithm", "local")


def command_for(config: Config) -> str | None:
    """`fedlalr run PRESET KEY=VALUE …`, proven to mean this configuration; None where no such command does.

    >>> command_for(load("quickstart", ["algorithm=fedavg", "rounds=5"]))
    'fedlalr run quickstart algorithm=fedavg rounds=5'
    """
    if config.name not in presets():
        return None
    wanted = config.problem()
    names = _names(load(config.name).problem(), wanted)
    try:
        overrides = [*names, *_changes(load(config.name, names).problem(), wanted)]
        if load(config.name, overrides).problem() != wanted:
            return None
    except ConfigError:  # the names alone do not make a configuration
        return None
    return shlex.join(["fedlalr", "run", config.name, *overrides])


def _names(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The overrides that change which algorithm, model, data set or scheme it is."""
    return [
        f"{section}={_text(wanted[section][key])}"
        for section, key in SHORT.items()
        if base[section][key] != wanted[section][key]
    ]


def _changes(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """The overrides that change everything else."""
    for key, value in wanted.items():
        if key not in SECTIONS:
            if base[key] != value:
                yield f"{key}={_text(value)}"
            continue
        for option, inner in value.items():
            if option not in base[key] or base[key][option] != inner:
                yield f"{key}.{option}={_text(inner)}"


def _text(value: Any) -> str:
    """A value as an override is written: bare where it reads back the same, else as JSON."""
    if isinstance(value, str):
        try:
            if parse(value) == value:
                return value
        except yaml.YAMLError:
            pass
    return json.dumps(value, ensure_ascii=False)
