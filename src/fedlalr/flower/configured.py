"""An app from a configuration: what the folders that `fedlalr flower export` writes are made of."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlalr.config import Config, build_population, load
from fedlalr.config.build import build_options
from fedlalr.config.errors import ConfigError
from fedlalr.data import Population
from fedlalr.flower.settings import settings_names

if TYPE_CHECKING:
    from flwr.app import Context

OVERRIDES, RUN_FOLDER = "overrides", "run-dir"
_SERVER_OPTIONS: dict[str, type] = {"deadline": float, "join-deadline": float, "retries": int, "layout": str}


def config_of(file: str | Path, context: Context) -> Config:
    """The configuration in a file, with the run's own `overrides` laid over it.

    `flwr run . --run-config 'overrides="rounds=5 algorithm.lr=0.01"'` reaches the server and every client.
    """
    return _config(str(file), _overrides(context))


def population_of(file: str | Path, context: Context) -> Population:
    """All clients' data, dealt as the configuration says; loaded once in a process."""
    return _population(str(file), _overrides(context))


def settings_of(config: Config, context: Context | None = None) -> dict[str, Any]:
    """The options of `fl.run` that a configuration gives, for the server, the clients and the simulator alike.

    A run directory of the run's (`run-dir`) is the server's: a run that broke off there goes on.
    """
    if config.trajectory is not None:
        raise ConfigError("a trajectory is recorded in the simulator alone; leave `trajectory` out on Flower")
    settings = {name: value for name, value in build_options(config).items() if name in settings_names()}
    folder = str(context.run_config.get(RUN_FOLDER, "")) if context is not None else ""
    return settings | ({"run_dir": folder, "resume": True} if folder else {})


def server_options(context: Context) -> dict[str, Any]:
    """The options of `FederatedStrategy` in the run's configuration: how long to wait, how often to try again."""
    given = context.run_config
    return {name.replace("-", "_"): kind(given[name]) for name, kind in _SERVER_OPTIONS.items() if name in given}


def _overrides(context: Context) -> str:
    return str(context.run_config.get(OVERRIDES, ""))


@cache
def _config(file: str, overrides: str) -> Config:
    return load(file, shlex.split(overrides))


@cache
def _population(file: str, overrides: str) -> Population:
    return build_population(_config(file, overrides))
