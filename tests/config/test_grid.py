import math
from pathlib import Path

import pytest
import torch

import fedlalr as fl
from fedlalr import config
from fedlalr.config.grid import FIRST_SEED, VALIDATION, choose, on_default_rates, points, qualities, score, trials


def test_every_method_of_the_quickstart_has_the_same_number_of_settings() -> None:
    loaded = config.load("quickstart")
    assert {len(points(loaded, method)) for method in loaded.methods} == {12}


def test_without_a_grid_rates_are_varied_around_the_configured_ones() -> None:
    loaded = config.load("cifar10")
    one, two = points(loaded, "fedavg"), points(loaded, "fedadam")
    assert len(one) == len(two) == len(points(loaded, "lafedopt")) == 9
    assert [point["lr"] for point in one] == [0.01, 0.032, 0.1, 0.32, 1.0, 3.2, 10.0, 32.0, 100.0]
    assert {point["lr"] for point in two} == {0.032, 0.1, 0.32}
    assert {point["server_lr"] for point in two} == {0.32, 1.0, 3.2}


def test_tuning_uses_held_out_samples_and_other_seeds(tmp_path: Path) -> None:
    loaded = config.load("quickstart", ["seed=3"])
    for trial in trials(loaded, ["fedlalr", "fedadam"], 2, tmp_path):
        assert [job.config.seed for job in trial.jobs] == [3 + FIRST_SEED, 4 + FIRST_SEED]
        for job in trial.jobs:
            assert job.config.data.validation == VALIDATION
            assert trial.settings.items() <= job.config.algorithm.options.items()
            assert job.config.algorithm.name == trial.method
    folders = [job.folder for trial in trials(loaded, ["fedlalr", "fedadam"], 2, tmp_path) for job in trial.jobs]
    assert len(set(folders)) == len(folders) == 48


@pytest.mark.parametrize("personal", ["personal=layers.2.*", "buffers=local"])
def test_with_personal_parameters_the_samples_that_clients_hold_out_decide(tmp_path: Path, personal: str) -> None:
    with pytest.raises(config.ConfigError, match=r"--grid tunes on held-out samples, .* set holdout=0\.2"):
        trials(config.load("quickstart", [personal]), ["fedlalr"], 1, tmp_path)
    trial = trials(config.load("quickstart", [personal, "holdout=0.3"]), ["fedlalr"], 1, tmp_path)[0]
    assert (trial.jobs[0].config.holdout, trial.jobs[0].config.data.validation) == (0.3, 0)


def test_unequal_budgets_are_rejected(tmp_path: Path) -> None:
    loaded = config.load("quickstart", ["grid.fedavg={lr: [0.1, 0.2]}"])
    with pytest.raises(config.ConfigError, match="12 settings of fedlalr, 2 settings of fedavg"):
        trials(loaded, ["fedlalr", "fedavg"], 1, tmp_path)


def test_the_best_setting_wins_and_the_edge_is_noted() -> None:
    choice = choose("fedavg", [({"lr": 0.1}, 0.5), ({"lr": 0.3}, 0.9), ({"lr": 1.0}, -math.inf)])
    assert (choice.settings, choice.score, choice.at_edge) == ({"lr": 0.3}, 0.9, ())
    assert choose("fedavg", [({"lr": 0.1}, 0.5), ({"lr": 0.3}, 0.5)]).at_edge == ("lr",)
    both = choose("fedadam", [({"lr": 1.0, "server_lr": s}, s) for s in (0.1, 0.2, 0.3)])
    assert both.at_edge == ("server_lr",)


def test_a_method_without_a_working_setting_is_an_error() -> None:
    with pytest.raises(config.ConfigError, match="every setting of fedavg in the grid failed"):
        choose("fedavg", [({"lr": 1.0}, -math.inf)])


@pytest.mark.parametrize(
    ("overrides", "default"),
    [
        (["algorithm=fedyogi"], True),
        (["algorithm=fedyogi", "methods.fedyogi.eps=0.1"], True),
        (["algorithm=fedyogi", "methods.fedyogi.server_lr=0.01"], False),  # chosen, though it is the default
        (["algorithm=fedyogi", "algorithm.lr=0.3"], False),
        (["algorithm=fedamsv1"], False),
    ],
)
def test_rates_are_default_unless_someone_chose_one(overrides: list[str], default: bool) -> None:
    assert on_default_rates(config.load("quickstart", overrides)) is default


def test_without_a_test_set_the_clients_held_out_samples_decide() -> None:
    inputs = torch.randn(3, 10, 3, generator=torch.Generator().manual_seed(0))
    clients = [(own, own.sum(1, keepdim=True)) for own in inputs]
    run = fl.run(
        torch.nn.Linear(3, 1), clients, fl.FedAvg(0.1), rounds=4, loss=torch.nn.functional.mse_loss, holdout=0.3,
        evaluate_every=2,
    )  # fmt: skip
    found = [record.per_client["loss"].mean for record in run.history if record.per_client]
    assert qualities(run.history, by_loss=True) == [None, -found[0], None, -found[1]]


def test_the_score_is_the_mean_of_the_last_tenth() -> None:
    curve = [0.0] * 18 + [0.4, 0.6]
    assert score([curve], rounds=20) == 0.5
    assert score([curve, [1.0] * 20], rounds=20) == 0.75
    assert score([curve[:-1]], rounds=20) == -math.inf
    assert score([[None] * 20], rounds=20) == -math.inf
