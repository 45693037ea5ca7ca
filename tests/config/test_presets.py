"""The presets against the paper's table of hyper-parameters."""

import json
from pathlib import Path

import pytest

from fedlalr import config
from fedlalr.algorithms import registry
from fedlalr.config.grid import points

RESULTS = Path(__file__).parents[2] / "docs" / "results"
METHODS = ("fedavg", "fedadam", "fedamsv1", "fedamsv2", "lafedopt", "fedlalr")

# local rates, server rates, betas, as printed in the paper
TABLE = {
    "cifar10": (
        (1.0, 0.1, 0.1, 0.1, 1e-4, 2e-3),
        (None, 1.0, 0.1, 0.1, None, None),
        (None, (0.9, 0.99), (0.9, 0.99), (0.9, 0.99), (0.8, 0.999), (0.9, 0.995)),
    ),
    "cifar100": (
        (2.0, 1.0, 1.0, 1.0, 1e-3, 2e-3),
        (None, 0.1, 0.1, 0.1, None, None),
        (None, (0.9, 0.99), (0.9, 0.99), (0.9, 0.99), (0.9, 0.999), (0.9, 0.995)),
    ),
    "shakespeare": (
        (1.0, 0.1, 0.1, 0.1, 1e-3, 5e-2),
        (None, 0.1, 0.1, 0.1, None, None),
        (None, (0.9, 0.998), (0.9, 0.998), (0.9, 0.998), (0.5, 0.999), (0.8, 0.998)),
    ),
}
EPS = (None, 1e-2, 1e-4, 1e-2, 1e-4, 1e-8)


@pytest.mark.parametrize("preset", TABLE)
@pytest.mark.parametrize("method", METHODS)
def test_a_paper_preset_has_the_papers_hyper_parameters(preset: str, method: str) -> None:
    i = METHODS.index(method)
    lrs, server_lrs, betas = TABLE[preset]
    algorithm = registry.create(method, **config.load(preset, [f"algorithm={method}"]).algorithm.options)
    assert algorithm.lr == lrs[i]
    if server_lrs[i] is not None:
        assert getattr(algorithm, "server_lr") == server_lrs[i]  # noqa: B009 - not every algorithm has one
    if betas[i] is not None:
        assert tuple(getattr(algorithm, "betas")) == betas[i]  # noqa: B009
    if EPS[i] is not None:
        assert getattr(algorithm, "eps") == EPS[i]  # noqa: B009


@pytest.mark.parametrize("preset", ["cifar10", "cifar100"])
def test_the_cifar_presets_are_the_papers_problem(preset: str) -> None:
    loaded = config.load(preset)
    assert (loaded.data.name, loaded.data.augment) == (preset, True)
    assert (loaded.partition.scheme, loaded.partition.clients, loaded.partition.alpha) == ("dirichlet", 100, 0.6)
    assert (loaded.clients_per_round, loaded.rounds, loaded.local.epochs, loaded.batch_size) == (50, 100, 5, 50)
    assert (loaded.weight_decay, loaded.schedule.options["factor"], loaded.weighting) == (1e-3, 0.998, "uniform")
    assert loaded.model.name == "convmixer"


def test_the_shakespeare_preset_is_the_papers_problem() -> None:
    loaded = config.load("shakespeare")
    assert (loaded.partition.scheme, loaded.partition.clients, loaded.clients_per_round) == ("natural", 100, 10)
    assert (loaded.rounds, loaded.local.epochs, loaded.batch_size) == (100, 5, 100)
    assert (loaded.weight_decay, loaded.schedule.options["factor"], loaded.model.name) == (1e-4, 0.998, "charlstm")


@pytest.mark.parametrize(("preset", "paper"), [("gpt-shakespeare", "shakespeare"), ("vit-cifar10", "cifar10")])
def test_a_transformers_preset_is_the_papers_problem_with_another_network(preset: str, paper: str) -> None:
    mine, theirs = (config.load(name) for name in (preset, paper))
    assert (mine.data.name, mine.partition, mine.clients_per_round) == (
        theirs.data.name,
        theirs.partition,
        theirs.clients_per_round,
    )
    assert (mine.rounds, mine.local, mine.schedule, mine.weight_decay) == (
        theirs.rounds,
        theirs.local,
        theirs.schedule,
        theirs.weight_decay,
    )
    for method in METHODS:
        ours, right = (config.load(name, [f"algorithm={method}"]).algorithm.options for name in (preset, paper))
        rates = ("lr", "server_lr")
        assert {k: v for k, v in ours.items() if k not in rates} == {k: v for k, v in right.items() if k not in rates}


@pytest.mark.parametrize(("preset", "tuned"), [("gpt-shakespeare", "gpt"), ("vit-cifar10", "vit")])
def test_a_transformers_preset_has_the_rates_that_were_tuned(preset: str, tuned: str) -> None:
    grid = json.loads((RESULTS / tuned / "grid.json").read_text(encoding="utf-8"))
    for method, settings in config.load(preset).methods.items():
        assert settings == settings | grid[method]["chosen"]


@pytest.mark.parametrize("preset", ["quickstart", "fashion", "mnist"])
def test_a_small_preset_differs_from_the_paper_only_in_rates(preset: str) -> None:
    for method in METHODS:
        mine = config.load(preset, [f"algorithm={method}"]).algorithm.options
        paper = config.load("cifar10", [f"algorithm={method}"]).algorithm.options
        assert {k: v for k, v in mine.items() if k not in ("lr", "server_lr")} == {
            k: v for k, v in paper.items() if k not in ("lr", "server_lr")
        }


def test_every_preset_has_a_description_and_the_papers_six_methods() -> None:
    transformers = {"gpt-shakespeare", "vit-cifar10"}
    papers = {"cifar10", "cifar100", "shakespeare"}
    assert set(config.presets()) == {"quickstart", "fashion", "mnist", *papers, *transformers}
    for name, description in config.presets().items():
        assert description
        assert set(config.load(name).methods) >= set(METHODS)


@pytest.mark.parametrize("preset", ["quickstart", "fashion"])
def test_rates_are_points_of_a_grid_of_the_same_size_for_every_method(preset: str) -> None:
    loaded = config.load(preset)
    for method, settings in loaded.methods.items():
        assert all(settings[name] in values for name, values in loaded.grid[method].items())
    assert len({len(points(loaded, method)) for method in loaded.methods}) == 1


def test_mnist_has_the_rates_of_fashion() -> None:
    assert config.load("mnist").methods == config.load("fashion").methods
