"""Parts of an app built from a configuration, for the folders written by `fedlalr flower export`."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlalr.config import Config, build_population, load
from fedlalr.config.build import build_options
from fedlalr.config.errors import ConfigError
from fedlalr.config.own import is_own
from fedlalr.data import Population
from fedlalr.flower.settings import settings_names

if TYPE_CHECKING:
    from flwr.app import Context

OVERRIDES, RUN_FOLDER = "overrides", "run-dir"
_SERVER_OPTIONS: dict[str, type] = {"deadline": float, "join-deadline": float, "retries": int, "layout": str}


def config_of(file: str | Path, context: Context) -> Config:
    """The configuration in a file, with the `overrides` of the run applied.

    `flwr run . --run-config 'overrides="rounds=5 algorithm.lr=0.01"'` reaches the server and every client.
    """
    return _config(str(file), _overrides(context))


def population_of(file: str | Path, context: Context) -> Population:
    """All clients' data, partitioned as configured; loaded once per process."""
    return _population(str(file), _overrides(context))


def settings_of(config: Config, context: Context | None = None) -> dict[str, Any]:
    """The options of `fl.run` in a configuration, for the server, the clients and the simulator.

    The run's `run-dir` is a directory on the server; an interrupted run there is resumed.
    """
    reject_own(config)
    if config.trajectory is not None:
        raise ConfigError("a trajectory can be recorded only in the simulator; remove `trajectory` to run on Flower")
    settings = {name: value for name, value in build_options(config).items() if name in settings_names()}
    folder = str(context.run_config.get(RUN_FOLDER, "")) if context is not None else ""
    return settings | ({"run_dir": folder, "resume": True} if folder else {})


def reject_own(config: Config) -> None:
    """Reject functions named in a configuration, which the other machines do not have."""
    for name in (config.data.name, config.model.name, config.loss or ""):
        if is_own(name):
            raise ConfigError(
                f"{name} is a function on this machine, but an app runs on others: export a preset, then return your "
                f"model and data from the functions in its task.py"
            )


def server_options(context: Context) -> dict[str, Any]:
    """The options of `FederatedStrategy` in the run's configuration: deadlines, retries and layout."""
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
