"""`fedlalr flower export`: check that a configuration can run on Flower, and write an app for it."""

from __future__ import annotations

import re
from pathlib import Path

from fedlalr import __version__
from fedlalr.config import Config, ConfigError, build_algorithm, build_model, build_population, dump, load
from fedlalr.config.errors import as_config_errors
from fedlalr.config.loading import check
from fedlalr.config.overrides import parse_overrides
from fedlalr.data import Population
from fedlalr.data.sources import available
from fedlalr.federation.problem import Problem
from fedlalr.federation.validation import check_cohort
from fedlalr.flower.client_data import RemoteClients
from fedlalr.flower.configured import reject_own, settings_of
from fedlalr.flower.settings import read_settings

NODES = 3
"""Default number of supernodes."""
DEADLINE, JOIN_DEADLINE = 3600.0, 600.0

_PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "{description}"
license = "Apache-2.0"
dependencies = ["fedlalr[flower]>={version}"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedlalr"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

# Settings that `flwr run . --run-config '…'` can change.
[tool.flwr.app.config]
# Changes to config.yaml: overrides="rounds=5 algorithm.lr=0.01"
overrides = ""
# A folder on the server for metrics and checkpoints. An interrupted run there is resumed.
run-dir = ""
# Maximum seconds that a round waits for replies, and for nodes to connect.
deadline = {deadline}
join-deadline = {join_deadline}
# How often a round with too few usable replies is repeated.
retries = 0
# Or "packed": one record for all slots, as Flower's mods expect.
layout = "records"
"""

_TASK = '''\
"""Model, data, method and settings. Replace any of these functions with your own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.app import Context
from torch import nn

from fedlalr.algorithms import Algorithm
from fedlalr.config import build_algorithm, build_model
from fedlalr.data import Population
from fedlalr.flower.configured import config_of, population_of, settings_of

FILE = Path(__file__).with_name("config.yaml")


def data(context: Context) -> Population:
    """All clients' data, partitioned as in config.yaml: a node trains only on the part of its `partition-id`.

    If every node has its own data, return that: a pair of tensors (inputs, targets) or a torch data set.
    """
    return population_of(FILE, context)


def model(context: Context) -> nn.Module:
    """The network."""
    config = config_of(FILE, context)
    return build_model(config.model, data(context), config.seed)


def algorithm(context: Context) -> Algorithm:
    """The method with its hyper-parameters."""
    return build_algorithm(config_of(FILE, context))


def settings(context: Context) -> dict[str, Any]:
    """The options of `fl.run`."""
    return settings_of(config_of(FILE, context), context)
'''

_CLIENT = '''\
"""The client app, which runs on every node."""

from fedlalr.flower import client_app

# Names, so that only the trainer imports the functions and torch; this file is imported for every message.
TASK = "{package}.task"
app = client_app(f"{{TASK}}:model", f"{{TASK}}:data", f"{{TASK}}:algorithm", f"{{TASK}}:settings")
'''

_SERVER = '''\
"""The server app, which runs beside the superlink."""

from {package}.task import algorithm, data, model, settings
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedlalr.flower import FederatedStrategy
from fedlalr.flower.configured import server_options

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds. The server uses only the test set."""
    population = data(context)
    strategy = FederatedStrategy(
        model(context),
        algorithm(context),
        settings(context),
        population=len(population),
        test=population,
        **server_options(context),
    )
    strategy.start(grid)
'''

_README = """\
# {name}

{description}

{clients} clients: every supernode serves the client of its `partition-id`. See the page on Flower in the documentation
of fedlalr for certificates, node keys and failures.

    pip install 'fedlalr[flower]'                                    # on every machine
    flower-superlink --insecure --disable-runtime-dependency-installation
    flower-supernode --insecure --superlink 127.0.0.1:8000 --port 9094 --node-config 'partition-id=0'   # and so on
    flwr run . --stream

The same run in the simulator, with the same bits on a CPU with one thread (with `clients_per_round`, this app samples
other cohorts, from a secret):

    fedlalr run {package}/config.yaml engine=reference
"""


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
        "deadline": DEADLINE,
        "join_deadline": JOIN_DEADLINE,
        "clients": clients,
    }
    inner = folder / package
    try:
        inner.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be created: {error.strerror}; choose another folder for the app") from error
    for path, text in (
        (folder / "pyproject.toml", _PYPROJECT),
        (folder / "README.md", _README),
        (inner / "client_app.py", _CLIENT),
        (inner / "server_app.py", _SERVER),
    ):
        path.write_text(text.format(**names), encoding="utf-8")
    (inner / "task.py").write_text(_TASK, encoding="utf-8")
    (inner / "__init__.py").write_text(f'"""{names["description"]}."""\n', encoding="utf-8")
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
