"""Which settings `benchmarks/wider_grid.py` runs next, from the scores that are known."""

import importlib.util
from pathlib import Path

import pytest

from fedlalr.config import load

FILE = Path(__file__).parents[2] / "benchmarks" / "wider_grid.py"
spec = importlib.util.spec_from_file_location("wider_grid", FILE)
assert spec is not None
assert spec.loader is not None
wider_grid = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wider_grid)

GRID = "grid={fedavg: {lr: [0.1, 0.3, 1.0]}, fedadam: {lr: [0.1, 0.3, 1.0], server_lr: [0.01, 0.1]}}"


def method(name, scores, tmp_path, final_rounds=None):
    axes = ("lr", "server_lr") if name == "fedadam" else ("lr",)
    tried = [{**dict(zip(axes, key, strict=True)), "score": score} for key, score in scores.items()]
    return wider_grid.Method(name, load("quickstart", [GRID]), tmp_path, {"tried": tried}, final_rounds)


def options(jobs, *names):
    return [tuple(job.config.algorithm.options[name] for name in names) for job in jobs]


def test_settings_of_the_grid_without_a_score_come_first_on_held_out_samples(tmp_path):
    jobs = method("fedavg", {(0.1,): 0.5}, tmp_path).jobs()
    assert options(jobs, "lr") == [(0.3,), (1.0,)]
    assert {(job.config.seed, job.config.data.validation) for job in jobs} == {(1000, 0.2)}


@pytest.mark.parametrize(("best", "beyond"), [(0.1, 0.033), (1.0, 3.3)])
def test_a_best_rate_at_the_edge_adds_one_beyond_it(best, beyond, tmp_path):
    scores = {(lr,): 0.9 if lr == best else 0.5 for lr in (0.1, 0.3, 1.0)}
    assert options(method("fedavg", scores, tmp_path).jobs(), "lr") == [(beyond,)]


def test_a_rate_beyond_the_edge_is_tried_with_all_values_of_the_other_axis(tmp_path):
    scores = {(lr, server): lr == 0.3 and server == 0.1 for lr in (0.1, 0.3, 1.0) for server in (0.01, 0.1)}
    jobs = method("fedadam", scores, tmp_path).jobs()
    assert options(jobs, "lr", "server_lr") == [(0.1, 1.0), (0.3, 1.0), (1.0, 1.0)]


def test_a_best_rate_inside_runs_three_seeds_on_all_samples(tmp_path):
    jobs = method("fedavg", {(0.1,): 0.5, (0.3,): 0.9, (1.0,): None}, tmp_path).jobs()  # None: the run failed
    assert options(jobs, "lr") == [(0.3,)] * 3
    assert [(job.config.seed, job.config.data.validation) for job in jobs] == [(0, 0.0), (1, 0.0), (2, 0.0)]
    assert {job.config.rounds for job in jobs} == {40}


def test_the_final_runs_may_be_longer(tmp_path):
    jobs = method("fedavg", {(0.1,): 0.5, (0.3,): 0.9, (1.0,): 0.5}, tmp_path, final_rounds=77).jobs()
    assert [job.config.rounds for job in jobs] == [77] * 3


def test_an_edge_that_was_widened_before_is_known(tmp_path):
    widened = method("fedavg", {(0.033,): 0.6, (0.1,): 0.9, (0.3,): 0.5, (1.0,): 0.5}, tmp_path)
    assert options(widened.jobs(), "lr") == [(0.1,)] * 3
    assert widened.as_dict()["chosen"] == {"lr": 0.1}
