"""Exported apps and the example: their server and client apps, run in one process, give the simulator's bits."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Context, RecordDict
from flwr.cli.config_utils import load_and_validate

import fedlalr as fl
from fedlalr.config import ConfigError, build_algorithm, build_model, build_population, load
from fedlalr.flower.configured import settings_of
from fedlalr.flower.export import export, for_nodes
from flower.in_process import InProcessGrid, Node

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
SMALL = ["rounds=2", "local.epochs=1", "model.hidden=4", "batch_size=100"]


@pytest.fixture
def imported():
    """Import an app's package from its folder, and unload it afterwards."""
    before, modules = list(sys.path), set(sys.modules)

    def load_app(folder, package):
        sys.path.insert(0, str(folder))
        return [importlib.import_module(f"{package}.{name}") for name in ("server_app", "client_app", "task")]

    yield load_app
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.split(".")[0].endswith("_app"):
            del sys.modules[name]


def run_in_process(server_app, client_app, config, nodes, state_dir):
    grid = InProcessGrid(
        {
            50 + node: Node(
                client_app.app, {"partition-id": node, "state-dir": str(state_dir), "warm": False}, run_config=config
            )
            for node in range(nodes)
        }
    )
    server_app.app(grid, Context(1, 0, {}, RecordDict(), config))


def final(run_dir):
    from safetensors.torch import load_file

    return load_file(sorted((Path(run_dir) / "checkpoint").glob("round-*"))[-1] / "state.safetensors")


def flat(result):
    return {name: torch.cat([t.reshape(-1) for t in tensors.values()]) for name, tensors in result.state.items()}


@pytest.mark.parametrize("algorithm", ["fedlalr", "scaffold", "fedadamw", "fedmuon"])
def test_an_exported_preset_gives_the_simulators_bits(tmp_path, imported, algorithm):
    config = for_nodes("quickstart", [*SMALL, f"algorithm={algorithm}"], 3)
    folder = export(config, tmp_path / "app")
    checked, warnings = load_and_validate(folder / "pyproject.toml")
    assert not warnings
    server_app, client_app, _ = imported(folder, "quickstart_app")
    given = dict(checked["tool"]["flwr"]["app"]["config"]) | {"run-dir": str(tmp_path / "run"), "overrides": "seed=4"}
    run_in_process(server_app, client_app, given, 3, tmp_path)
    changed = load(folder / "quickstart_app" / "config.yaml", ["seed=4"])
    population = build_population(changed)
    wanted = fl.run(
        build_model(changed.model, population, 4),
        population,
        build_algorithm(changed),
        engine="reference",
        **settings_of(changed),
    )
    found = final(tmp_path / "run")
    assert all(torch.equal(found[f"slot/{name}"], value) for name, value in flat(wanted).items())


def test_an_export_has_one_client_per_node_by_default(tmp_path):
    config = for_nodes("quickstart", [], 4)
    assert (config.partition.clients, config.clients_per_round, config.device) == (4, None, "cpu")
    config = for_nodes("quickstart", ["partition.clients=8", "clients_per_round=2"])
    assert (config.partition.clients, config.clients_per_round) == (8, 2)
    assert for_nodes("quickstart", ["partition={scheme: iid}"], 4).partition.clients == 4
    with pytest.raises(ConfigError, match=r"--nodes 4 contradicts partition\.clients=8"):
        for_nodes("quickstart", ["partition.clients=8"], 4)
    export(config, tmp_path / "app")
    with pytest.raises(ConfigError, match="already exists and is not empty"):
        export(config, tmp_path / "app")
    with pytest.raises(ConfigError, match=r"partition\.clients=3"):
        export(for_nodes("quickstart", ["partition.clients=null"]), tmp_path / "other")


def test_an_exported_configuration_is_the_same_run_in_the_simulator(tmp_path):
    config = for_nodes("fashion", ["algorithm=fedadam", "rounds=7"], 5)
    folder = export(config, tmp_path / "app")
    again = load(folder / "fashion_app" / "config.yaml")
    assert again.problem() == config.problem()
    assert "5 clients" in (folder / "README.md").read_text()


def test_the_example_gives_the_simulators_bits(tmp_path, imported):
    given = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    _, warnings = load_and_validate(EXAMPLE / "pyproject.toml")
    assert not warnings
    server_app, client_app, task = imported(EXAMPLE, "digits_app")
    config = {**given, "run-dir": str(tmp_path / "run"), "rounds": 2, "local-epochs": 1, "batch-size": 100}
    run_in_process(server_app, client_app, config, given["nodes"], tmp_path)
    plain = Context(1, 0, {}, RecordDict(), {**config, "run-dir": ""})
    wanted = fl.run(
        task.model(plain), task.data(plain), task.algorithm(plain), engine="reference", **task.settings(plain)
    )
    found = final(tmp_path / "run")
    assert all(torch.equal(found[f"slot/{name}"], value) for name, value in flat(wanted).items())


def test_a_trajectory_is_rejected_on_flower():
    config = load("quickstart", ["trajectory.clients=[0]"])
    with pytest.raises(ConfigError, match="only in the simulator"):
        settings_of(config)
