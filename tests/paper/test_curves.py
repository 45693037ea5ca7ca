import csv
import math
from pathlib import Path

import numpy as np
import pytest

from fedlalr.config import execute, load
from fedlalr.federation import RoundFailed
from fedlalr.federation.trajectory import V_HAT_SQUARED
from fedlalr.paper.curves import collect, over, passes_per_round, write_curves, write_trajectories
from fedlalr.paper.plans import FigureLine, FigurePlan, Panel

SMALL = ("rounds=3", "partition.clients=12", "clients_per_round=2", "local.steps=2", "engine=reference")


def small(*overrides):
    return load("quickstart", [*SMALL, *overrides])


def plan(*lines):
    return FigurePlan("cifar", (Panel("digits", "digits", lines, "digits"),))


def collected(grid, seeds):
    the_plan, folder = grid
    return collect(the_plan, [job for job in the_plan.jobs(folder, seeds) if over(job)], folder, seeds)


def run(line: FigureLine, folder: Path, seed: int = 0) -> None:
    job = line.job(folder / "digits", seed)
    execute(job.config, job.folder)


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """FedLALR with two seeds, FedAvg that diverges, FedAdam not run."""
    folder = tmp_path_factory.mktemp("runs")
    lines = (
        FigureLine("fedlalr", "FedLALR", small("trajectory={clients: [0, 1], rounds: [1, 3]}")),
        FigureLine("fedavg", "FedAvg", small("algorithm=fedavg", "algorithm.lr=1e30")),
        FigureLine("fedadam", "FedAdam", small("algorithm=fedadam")),
    )
    run(lines[0], folder)
    run(lines[0], folder, seed=1)
    with pytest.raises(RoundFailed):
        run(lines[1], folder)
    return plan(*lines), folder


def test_runs_become_arrays_over_seeds_and_rounds(grid):
    (result,) = collected(grid, 3)
    assert set(result.lines) == {"fedlalr", "fedavg"}
    one = result.lines["fedlalr"]
    assert (one.seeds, one.accuracy.shape, one.failures) == ((0, 1), (2, 3), (None, None))
    assert np.isfinite(one.accuracy).all()
    assert len(one.trajectories) == 2


def test_a_failed_run_is_there_with_its_reason_and_nothing_after(grid):
    broken = collected(grid, 1)[0].lines["fedavg"]
    assert "round" in broken.failures[0]
    assert math.isnan(broken.accuracy[0, -1])


def test_a_run_on_another_device_or_engine_is_the_same_run(grid):
    the_plan, folder = grid
    line = the_plan.panels[0].lines[0]
    job = line.job(folder / "digits", 0)
    assert over(job)
    for change, same in (("engine=stacked", True), ("device=cuda", True), ("weight_decay=0.1", False)):
        other = small("trajectory={clients: [0, 1], rounds: [1, 3]}", change) if "engine" not in change else None
        config = other or load("quickstart", [*SMALL[:-1], "trajectory={clients: [0, 1], rounds: [1, 3]}", change])
        assert over(FigureLine("fedlalr", "FedLALR", config).job(folder / "digits", 0)) is same


def test_a_run_under_way_is_not_over(tmp_path):
    line = FigureLine("fedlalr", "FedLALR", small())
    assert not over(line.job(tmp_path / "digits", 0))


def test_the_table_has_a_line_for_every_recorded_round(grid, tmp_path):
    results = collected(grid, 2)
    shown_twice = [*results, results[0]]
    with write_curves(shown_twice, tmp_path / "cifar.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    mine = [line for line in lines if line["line"] == "fedlalr"]
    assert [(line["seed"], line["round"]) for line in mine] == [(s, t) for s in "01" for t in "123"]
    assert float(mine[0]["accuracy"]) == pytest.approx(results[0].lines["fedlalr"].accuracy[0, 0], rel=1e-5)
    assert float(mine[2]["passes"]) == pytest.approx(3 * 2 * 2 * 10 / 1442, rel=1e-4)
    assert len([line for line in lines if line["line"] == "fedavg"]) < 3


def test_the_table_of_trajectories_has_a_line_for_every_step(grid, tmp_path):
    with write_trajectories(collected(grid, 1), tmp_path / "trajectory.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(line["round"], line["client"], line["step"]) for line in lines[:3]] == [
        ("1", "0", "1"),
        ("1", "0", "2"),
        ("1", "1", "1"),
    ]
    assert float(lines[0][V_HAT_SQUARED]) > 0


def test_passes_over_the_data_follow_from_the_setting():
    assert passes_per_round(load("cifar10", ["clients_per_round=75"])) == 3.75
    steps = load("cifar10", ["clients_per_round=10", "local.steps=5", "batch_size=20", "data.validation=0.02"])
    assert passes_per_round(steps) == pytest.approx(1000 / 49_000)
    assert math.isnan(passes_per_round(load("cifar10", ["local={start: 3, base: 4.0}"])))
