"""`fedlalr flower export`: check that a configuration can run on Flower, and write an app for it."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from string import Template

from fedlalr import __version__
from fedlalr.config import Config, ConfigError, build_algorithm, build_model, build_population, dump, load
from fedlalr.config.errors import as_config_errors
from fedlalr.config.loading import check
from fedlalr.config.overrides import parse_overrides
from fedlalr.data.sources import available
from fedlalr.federation.problem import Problem
from fedlalr.federation.validation import check_cohort
from fedlalr.flower.client_data import RemoteClients
from fedlalr.flower.configured import reject_own, settings_of
from fedlalr.flower.settings import read_settings

NODES = 3
"""Default number of supernodes."""
_TEMPLATE = resources.files("fedlalr.flower") / "app_template"
"""The files of an app, with `${name}` where the text depends on the configuration."""


def for_nodes(source: str | None, overrides: list[str], nodes: int | None = None) -> Config:
    """A preset's configuration with one client per node, all clients in every round, on the CPU.

    The number of nodes equals `partition.clients`; either may be given.
    """
    given = parse_overrides(overrides)
    partition = given.get("partition", {})
    clients = partition.get("clients", nodes or NODES) if isinstance(partition, dict) else None
    if nodes is not None and clients != nodes:
        raise ConfigError(
            f"--nodes {nodes} contradicts partition.clients={clients}: every node serves one client; give only one of "
            f"them, or the same number for both"
        )
    config = load(source, overrides)
    reject_own(config)
    tree = config.model_dump()
    tree["partition"]["clients"] = clients
    fitted = {"clients_per_round": None, "device": "cpu", "checkpoint_every": 1}
    return check(tree | {name: value for name, value in fitted.items() if name not in given})


def export(config: Config, folder: str | Path) -> Path:
    """Write an app for a configuration into a new or empty folder, after checking that the app can run.

    The partition is checked if the data set is on this machine.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} already exists and is not empty; choose a new folder for the app")
    clients = check_settings(config)
    if data_here(config):
        check_data(config)
    package = f"{re.sub(r'[^a-z0-9]+', '_', config.name.lower()).strip('_') or 'run'}_app"
    names = {
        "name": package.replace("_", "-"),
        "package": package,
        "description": f"{config.algorithm.name} on {config.data.name}, {clients} clients",
        "version": __version__,
        "clients": clients,
    }
    inner = folder / package
    try:
        inner.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}; choose another folder for the app") from error
    for source, place in ((_TEMPLATE, folder), (_TEMPLATE / "package", inner)):
        for file in source.iterdir():
            if file.is_file():
                text = Template(file.read_text(encoding="utf-8")).substitute(names)
                (place / file.name.removesuffix(".template")).write_text(text, encoding="utf-8")
    (inner / "config.yaml").write_text(dump(config), encoding="utf-8")
    return folder


def check_settings(config: Config) -> int:
    """Reject settings that cannot run with any data; returns the number of clients."""
    clients = config.partition.clients
    if clients is None:
        raise ConfigError("the number of clients is missing, one per node: set partition.clients=3, for example")
    with as_config_errors(ValueError, TypeError):
        settings = read_settings(settings_of(config))
        settings.rules(build_algorithm(config))
        check_cohort(settings.clients_per_round, clients, settings.min_clients)
    return clients


def check_data(config: Config) -> Problem:
    """Reject data that cannot be partitioned, or a model that cannot be trained on it; returns the server's problem."""
    clients = check_settings(config)
    with as_config_errors(ValueError, TypeError):
        population = build_population(config)
        if len(population) != clients:
            raise ConfigError(
                f"the data set has {len(population)} clients, but partition.clients is {clients}; "
                f"set it to {len(population)}"
            )
        empty = [client for client, size in enumerate(population.sizes.tolist()) if size == 0]
        if empty:
            raise ConfigError(f"client {empty[0]} has no samples to train on; change the settings of partition")
        model = build_model(config.model, population, config.seed)
        remote, settings = RemoteClients(clients, population.test), read_settings(settings_of(config))
        return Problem.of(model, remote, build_algorithm(config), settings, remote=True)


def data_here(config: Config) -> bool:
    """Whether the data set is on this machine, so that it can be checked."""
    if config.data.folder is not None:
        return Path(config.data.folder).exists()
    return any(data.name == config.data.name and data.where is not None for data in available())
