from pathlib import Path

import pytest

from fedlalr import config
from fedlalr.config import ConfigError
from fedlalr.federation.trajectory import read_trajectory

SMALL = ("rounds=3", "partition.clients=12", "clients_per_round=3", "local.steps=2", "engine=reference")


def small(*overrides: str) -> config.Config:
    return config.load("quickstart", [*SMALL, *overrides])


def test_a_configuration_can_request_a_trajectory(tmp_path: Path) -> None:
    wanted = small("trajectory={clients: [3, 7], rounds: [1, 3]}")
    config.execute(wanted, tmp_path)
    points = read_trajectory(tmp_path / "trajectory.jsonl")
    assert [point[:3] for point in points] == [(t, client, k) for t in (1, 3) for client in (3, 7) for k in (1, 2)]
    assert config.load(tmp_path) == wanted


def test_it_changes_the_cohorts_and_so_the_problem() -> None:
    assert small("trajectory.clients=[3]").problem() != small().problem()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trajectory.clients=[12]", "numbers from 0 to 11"),
        ("trajectory={clients: [0], rounds: [0]}", "trajectory.rounds.0"),
        ("trajectory.clients=[]", "at least 1 item"),
        ("trajectory={clients: [0], rounds: [1, 4]}", "^trajectory.rounds contains 4, but rounds is 3"),
        ("trajectory.clients=[0, 1, 2, 3]", "^trajectory.clients has 4 clients, but clients_per_round is 3"),
        ("trajectory.client=[0]", "Did you mean 'trajectory.clients'"),
    ],
)
def test_invalid_trajectories_are_rejected(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.execute(small(override))


def test_a_method_without_second_moments_is_rejected() -> None:
    with pytest.raises(ConfigError, match="which fedavg does not have"):
        small("trajectory.clients=[0]", "algorithm=fedavg")


def test_a_comparison_with_such_a_method_is_rejected_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="which fedavg does not have"):
        config.with_method(small("trajectory.clients=[0]"), "fedavg")


def test_overwriting_a_run_removes_its_records(tmp_path: Path) -> None:
    config.execute(small("trajectory.clients=[0]"), tmp_path)
    config.execute(small(), tmp_path, overwrite=True)
    assert not (tmp_path / "trajectory.jsonl").exists()
