"""Whether a configuration can run on Flower: asked before an app is written, and before a process is started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlalr.config import Config, ConfigError, build_algorithm, build_model, build_population
from fedlalr.data import Population
from fedlalr.data.sources import DataCorrupt, available
from fedlalr.federation.session import Problem
from fedlalr.federation.validation import check_cohort
from fedlalr.flower.client_data import RemoteClients
from fedlalr.flower.configured import settings_of
from fedlalr.flower.settings import read_settings


def check_settings(config: Config) -> int:
    """Refuse settings that cannot run, whatever the data are; gives the number of clients."""
    clients = config.partition.clients
    if clients is None:
        raise ConfigError("say how many clients there are, one for each node: partition.clients=3")
    with _as_config_error():
        settings = read_settings(settings_of(config))
        settings.rules(build_algorithm(config))
        check_cohort(settings.clients_per_round, clients, settings.min_clients)
    return clients


def check_data(config: Config) -> Population:
    """Refuse data that cannot be dealt to the clients, or a network that cannot be trained on them; gives the data."""
    clients = check_settings(config)
    with _as_config_error():
        population = build_population(config)
        if len(population) != clients:
            raise ConfigError(
                f"the data make {len(population)} clients, not {clients}: partition.clients says how many"
            )
        empty = [client for client, size in enumerate(population.sizes.tolist()) if size == 0]
        if empty:
            raise ConfigError(f"client {empty[0]} has no samples, so its node has nothing to train on; see partition")
        model = build_model(config.model, population, config.seed)
        Problem.of(
            model, RemoteClients(clients), build_algorithm(config), read_settings(settings_of(config)), remote=True
        )
    return population


def data_here(config: Config) -> bool:
    """Whether the data are on this machine, so that they can be looked at."""
    if config.data.folder is not None:
        return Path(config.data.folder).exists()
    return any(data.name == config.data.name and data.where is not None for data in available())


@contextmanager
def _as_config_error() -> Iterator[None]:
    """What the settings do to each other, as an error of the configuration."""
    try:
        yield
    except DataCorrupt:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error
