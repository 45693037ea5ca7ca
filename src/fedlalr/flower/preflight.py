"""Check that a configuration can run on Flower, before writing an app or starting a process."""

from __future__ import annotations

from pathlib import Path

from fedlalr.config import Config, ConfigError, build_algorithm, build_model, build_population
from fedlalr.config.errors import as_config_errors
from fedlalr.data import Population
from fedlalr.data.sources import available
from fedlalr.federation.problem import Problem
from fedlalr.federation.validation import check_cohort
from fedlalr.flower.client_data import RemoteClients
from fedlalr.flower.configured import settings_of
from fedlalr.flower.settings import read_settings


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


def check_data(config: Config) -> Population:
    """Reject data that cannot be partitioned, or a model that cannot be trained on it; returns the data."""
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
        Problem.of(
            model, RemoteClients(clients), build_algorithm(config), read_settings(settings_of(config)), remote=True
        )
    return population


def data_here(config: Config) -> bool:
    """Whether the data set is on this machine, so that it can be checked."""
    if config.data.folder is not None:
        return Path(config.data.folder).exists()
    return any(data.name == config.data.name and data.where is not None for data in available())
