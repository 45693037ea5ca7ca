"""The command line that repeats a run, and the description of a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fedlalr.config import Config, ConfigError, load, presets, with_method
from fedlalr.config.loading import CONFIG_FILE
from fedlalr.config.overrides import SHORT
from fedlalr.config.own import is_own
from fedlalr.config.yaml_file import parse
from fedlalr.report.tables import DATA_NAMES

SECTIONS = ("data", "partition", "model", "algorithm", "local", "schedule")
INCIDENTAL = ("algorithm", "seed", "device", "engine", "trajectory")
"""Settings that are not part of a problem's description."""
MOST_NAMED = 3


def command_for(config: Config) -> str | None:
    """`fedlalr run PRESET KEY=VALUE …`, verified to give this configuration; None if no such command does.

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
    except ConfigError:  # the names alone are not a valid configuration
        return None
    return shlex.join(["fedlalr", "run", config.name, *overrides])


def stored_command(config: Config, run_dir: Path) -> str | None:
    """`fedlalr run RUN_DIR/config.yaml --run-dir again/RUN_DIR`; None if that file gives another configuration."""
    stored = run_dir / CONFIG_FILE
    try:
        if load(stored).problem() != config.problem():
            return None
    except ConfigError:  # the file is missing or damaged
        return None
    first = stored.parts[0]
    # ./ keeps names that look like an option or a setting from being read as one
    source = f"./{stored}" if first.startswith("-") or "=" in first else str(stored)
    return shlex.join(["fedlalr", "run", source, "--run-dir", str(_again(run_dir))])


def _again(run_dir: Path) -> Path:
    """A separate directory for the repeated run, so that no report counts it as another seed.

    >>> print(_again(Path("runs/mine")), _again(Path("/data/mine")), _again(Path("../mine")))
    again/runs/mine again/data/mine again/mine
    """
    named = run_dir if run_dir.name not in ("", "..") else run_dir.resolve()
    return Path("again", *(part for part in named.parts if part not in (named.anchor, "..")))


def description_of(configs: Iterable[Config], methods: Sequence[str] = ()) -> str:
    """The descriptions of some runs, and the settings that differ from the presets that these describe.

    With `methods`, the settings in their tables count too.

    >>> description_of([load("quickstart", ["algorithm=fedavg", "rounds=5"]), load("quickstart", ["seed=1"])])
    'digits on 100 clients in seconds, no download; changed: rounds=5'
    >>> description_of([load("quickstart", ["partition=shards"])])
    'digits on 100 clients in seconds, no download; changed: partition.scheme=shards'
    >>> description_of([load("quickstart", ["methods.fedavg.lr=0.01"])], ["fedavg"])
    'digits on 100 clients in seconds, no download; changed: methods.fedavg.lr=0.01'
    """
    changed: dict[str, dict[str, None]] = {}
    for config in configs:
        changed.setdefault(config.description, {}).update(dict.fromkeys(_departures(config, methods)))
    return "; ".join(
        f"{description}{_in_words(list(changes))}" for description, changes in changed.items() if description
    )


NETWORKS = {
    "mlp": "perceptron",
    "cnn": "convolutional network",
    "convmixer": "ConvMixer",
    "charlstm": "LSTM",
    "gpt": "GPT",
    "vit": "vision transformer",
}
SCHEMES = {
    "dirichlet": "Dirichlet {alpha:g}",
    "dirichlet-classes": "Dirichlet {alpha:g} by class",
    "iid": "IID",
    "shards": "shards",
    "lognormal": "log-normal sizes",
    "natural": "natural partition",
}


def title_of(config: Config) -> str:
    """A problem in the title of a figure: data, network, clients and their partition.

    >>> title_of(load("quickstart"))
    'Digits, perceptron, 10 of 100 clients, Dirichlet 0.3'
    >>> title_of(load("shakespeare", ["clients_per_round=null"]))
    'Shakespeare, LSTM, 100 clients, natural partition'
    """
    words = [DATA_NAMES.get(config.data.name, config.data.name), NETWORKS.get(config.model.name, config.model.name)]
    if not is_own(config.data.name):  # a function of yours makes the clients
        population, cohort = config.partition.clients, config.clients_per_round
        known = [str(number) for number in (cohort, population) if number is not None]
        words += [f"{' of '.join(known)} clients"] if known else []
        words.append(SCHEMES[config.partition.scheme].format(alpha=config.partition.alpha))
    return ", ".join(words)


def _departures(config: Config, methods: Sequence[str]) -> list[str]:
    """The settings that differ from the preset that a run's description comes from."""
    origin = next((load(name) for name in presets() if load(name).description == config.description), None)
    if origin is None:
        return []
    changes = _changes(origin.problem(), config.problem())
    in_name = isinstance(config.compression, str)  # a short form is part of the method's name
    told = (*INCIDENTAL, "compression") if in_name else INCIDENTAL
    named = [change for change in changes if change.split("=")[0].split(".")[0] not in told]
    for method in methods:
        before, now = (with_method(one, method).algorithm.options for one in (origin, config))
        named += [f"methods.{method}.{key}={_text(now[key])}" for key in now if now[key] != before.get(key)]
    return named


def _in_words(changes: list[str]) -> str:
    names = list(dict.fromkeys(change.split("=")[0] for change in changes))
    if not names:
        return ""
    return f"; changed: {', '.join(changes if len(changes) <= MOST_NAMED else names)}"


def _names(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The overrides that change the name of the algorithm, model, data set or scheme."""
    return [
        f"{section}={_text(wanted[section][key])}"
        for section, key in SHORT.items()
        if section in wanted and base[section][key] != wanted[section][key]
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
    """A value as written in an override: bare if it parses to the same value, else as JSON."""
    if isinstance(value, str):
        try:
            if parse(value) == value:
                return value
        except yaml.YAMLError:
            pass
    return json.dumps(value, ensure_ascii=False)
