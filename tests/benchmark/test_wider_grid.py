"""Which settings `benchmarks/wider_grid.py` runs next, from the scores that are known."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from fedlalr.config import RunDirectory, execute, load

FILE = Path(__file__).parents[2] / "benchmarks" / "wider_grid.py"
spec = importlib.util.spec_from_file_location("wider_grid", FILE)
assert spec is not None
assert spec.loader is not None
wider_grid = importlib.util.module_from_spec(spec)
spec.loader.exec_module(wider_grid)

GRID = "grid={fedavg: {lr: [0.1, 0.3, 1.0]}, fedadam: {lr: [0.1, 0.3, 1.0], server_lr: [0.01, 0.1]}}"


def method(name, scores, tmp_path, **more):
    axes = ("lr", "server_lr") if name == "fedadam" else ("lr",)
    tried = [{**dict(zip(axes, key, strict=True)), "score": score} for key, score in scores.items()]
    return wider_grid.Method(name, load("quickstart", [GRID]), tmp_path, {"tried": tried}, **more)


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


def test_of_two_rates_only_one_is_changed_at_a_time(tmp_path):
    scores = {(lr, server): lr == 0.3 and server == 0.1 for lr in (0.1, 0.3, 1.0) for server in (0.01, 0.1)}
    assert options(method("fedadam", scores, tmp_path).jobs(), "lr", "server_lr") == [(0.3, 1.0)]


def test_a_best_setting_beyond_the_grid_gets_its_own_neighbours(tmp_path):
    scores = {(lr, server): 0.5 for lr in (0.1, 0.3, 1.0) for server in (0.01, 0.1)} | {(0.3, 1.0): 0.9}
    jobs = method("fedadam", scores, tmp_path).jobs()
    assert options(jobs, "lr", "server_lr") == [(0.1, 1.0), (1.0, 1.0), (0.3, 10.0)]


def test_no_more_than_six_settings_are_added(tmp_path):
    scores = {(0.1 * 3**k,): k / 10 for k in range(9)}
    tuned = method("fedavg", {(0.3,): 0, (1.0,): 0} | scores, tmp_path)
    assert options(tuned.jobs(), "lr") == [(0.1 * 3**8,)] * 3


def test_screening_runs_few_rounds_of_all_settings_and_more_of_the_best_three(tmp_path):
    four = load("quickstart", ["grid={fedavg: {lr: [0.03, 0.1, 0.3, 1.0]}}"])
    tuned = wider_grid.Method("fedavg", four, tmp_path, {}, screen=15)
    jobs = tuned.jobs()
    assert [(job.config.rounds, *lr) for job, lr in zip(jobs, options(jobs, "lr"), strict=True)] == [
        (15, 0.03), (15, 0.1), (15, 0.3), (15, 1.0),
    ]  # fmt: skip
    tuned.screened = {(0.03,): 0.4, (0.1,): 0.8, (0.3,): 0.7, (1.0,): -math.inf}
    assert options(tuned.jobs(), "lr") == [(0.1,), (0.3,), (0.03,)]
    assert {job.config.rounds for job in tuned.jobs()} == {40}
    tuned.scores = {(0.03,): 0.5, (0.1,): 0.8, (0.3,): 0.9}  # the longer runs decide
    assert tuned.best().settings == {"lr": 0.3}
    known = tuned.as_dict()
    assert known["tried"][3] == {"lr": 1.0, "screened": None}
    again = wider_grid.Method("fedavg", four, tmp_path, known, screen=15)
    assert (again.screened, again.scores) == (tuned.screened, tuned.scores)


def test_a_screened_run_is_resumed_not_repeated(tmp_path):
    quick = load("quickstart", ["grid={fedavg: {lr: [0.1, 0.3]}}", "rounds=4", "clients_per_round=2"])
    file = tmp_path / "grid.json"
    tuned = wider_grid.Method("fedavg", quick, tmp_path, {}, screen=2, final_rounds=0)
    wider_grid.run([tuned], 1, math.inf, file)
    run = RunDirectory(tmp_path / "grid" / "fedavg" / "lr-0.3" / "seed-1000")
    assert [record.round for record in run.records()] == [1, 2, 3, 4]
    assert tuned.screened[0.3,] == run.records()[1].accuracy
    assert tuned.scores[0.3,] == run.records()[3].accuracy
    assert json.loads(file.read_text())["fedavg"] == tuned.as_dict()
    whole = tmp_path / "whole"
    execute(run.config(), whole)
    assert [one.accuracy for one in RunDirectory(whole).records()] == [one.accuracy for one in run.records()]


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
