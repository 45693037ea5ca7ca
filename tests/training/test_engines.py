"""The contract of the engines: every algorithm on every engine gives the reference engine's result.

Float64 on the CPU, unequal clients, partial participation, clipping and both weight decays; compared are the server's
slots, the buffers, what every client keeps, and the losses.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedlalr as fl
from fedlalr.algorithms import ALGORITHMS, Algorithm
from fedlalr.data.population import DatasetClients, as_clients
from fedlalr.federation.run import initial_state
from fedlalr.federation.sampling import sample
from fedlalr.federation.server import Outcome, Rules, ServerState, play_round
from fedlalr.training import ENGINES, Engine, Epochs, LogInterval, Steps, Training
from fedlalr.training.layout import Layout

TOLERANCE = 1e-10

VARIANTS: dict[str, Algorithm] = {name: make() for name, make in ALGORITHMS.items()} | {
    "fedlalr restart max": fl.FedLALR(momentum="restart", second_moment="max"),
    "lafedopt local": fl.LAFedOpt(correction="local"),
    "lafedopt joint": fl.LAFedOpt(correction="joint", server="adam"),
}

MODELS = {
    "perceptron": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)),
    "logistic": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)),
    # No bias before a BatchNorm: its gradient is zero up to rounding, which an adaptive step would blow up on any
    # engine.
    "batchnorm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64, 5, bias=False),
        nn.BatchNorm1d(5),
        nn.Linear(5, 3),
    ),
    "groupnorm": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
    ),
}

pytestmark = pytest.mark.filterwarnings("error")

engines = pytest.mark.parametrize("engine", [name for name in ENGINES if name != "reference"])


def make_training(model: str = "batchnorm", algorithm: str = "fedlalr", **options: object) -> Training:
    torch.manual_seed(1)
    module = MODELS[model]().double()
    sizes = options.pop("sizes", (7, 12, 6, 10, 11, 23))  # no batch of a single sample, which BatchNorm refuses
    generator = torch.Generator().manual_seed(2)
    clients = [
        (
            torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]
    settings = {
        "local": Epochs(2),
        "batch_size": 4,
        "weight_decay": 1e-2,
        "decoupled_weight_decay": 1e-2,
        "clip_norm": 0.5,
        "loss": nn.functional.cross_entropy,
        "seed": 3,
        "device": torch.device("cpu"),
    }
    return Training(module, Layout.of(module), as_clients(clients), VARIANTS[algorithm], **(settings | options))


@contextmanager
def started(name: str, training: Training) -> Iterator[tuple[Engine, Training]]:
    training = replace(training, model=copy.deepcopy(training.model))
    engine = ENGINES[name](training)
    try:
        yield engine, training
    finally:
        engine.close()


def federate(name: str, training: Training, rounds: int = 3, cohort: int = 4, **rules: object) -> list[Outcome]:
    with started(name, training) as (engine, private):
        state, outcomes = initial_state(private), []
        for t in range(1, rounds + 1):
            clients = sample(len(private.clients), cohort, private.seed, t)
            outcomes.append(play_round(state, clients, 0.9**t * 0.05, engine, private, Rules(**rules)))
            state = outcomes[-1].state
    return outcomes


def difference(given: Tensor, wanted: Tensor) -> float:
    """Relative to the largest entry."""
    assert given.shape == wanted.shape
    assert given.dtype == wanted.dtype
    scale = float(wanted.double().abs().max())
    return float((given.double() - wanted.double()).abs().max()) / (scale or 1.0)


def assert_same_state(given: ServerState, wanted: ServerState) -> None:
    assert set(given.slots) == set(wanted.slots)
    assert set(given.buffers) == set(wanted.buffers)
    assert set(given.kept) == set(wanted.kept)
    pairs = {name: (given.slots[name], tensor) for name, tensor in wanted.slots.items()}
    pairs |= {name: (given.buffers[name], tensor) for name, tensor in wanted.buffers.items()}
    for client, kept in wanted.kept.items():
        pairs |= {f"{name} of client {client}": (given.kept[client][name], tensor) for name, tensor in kept.items()}
    worst = {name: difference(*pair) for name, pair in pairs.items()}
    assert max(worst.values()) <= TOLERANCE, worst


def assert_same_outcomes(given: list[Outcome], wanted: list[Outcome]) -> None:
    for mine, right in zip(given, wanted, strict=True):
        assert_same_state(mine.state, right.state)
        assert mine.train_loss == pytest.approx(right.train_loss, rel=TOLERANCE)
        assert (mine.replied, mine.accepted, mine.rejected) == (right.replied, right.accepted, right.rejected)


@engines
@pytest.mark.parametrize("algorithm", VARIANTS)
def test_every_algorithm_gives_the_references_result(engine, algorithm):
    training = make_training("batchnorm", algorithm)
    assert_same_outcomes(federate(engine, training), federate("reference", training))


@engines
@pytest.mark.parametrize("algorithm", ["fedlalr", "fedavg", "localadam", "scaffold"])
@pytest.mark.parametrize("model", [name for name in MODELS if name != "batchnorm"])
def test_every_kind_of_model_gives_the_references_result(engine, model, algorithm):
    training = make_training(model, algorithm)
    assert_same_outcomes(federate(engine, training), federate("reference", training))


@engines
@pytest.mark.parametrize(
    "options",
    [
        {"sizes": (8,) * 5},
        {"sizes": (10,) * 5},
        {"drop_last": True},
        {"local": Steps(5)},
        {"local": LogInterval(1, 2.0)},
        {"batch_size": None},
        {"batch_size": 100},
        {"clip_norm": None, "weight_decay": 0.0, "decoupled_weight_decay": 0.0},
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64))},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"loss": lambda outputs, targets: (outputs.softmax(1) - nn.functional.one_hot(targets, 3)).square().mean()},
    ],
    ids=[
        "equal",
        "equal-uneven",
        "drop-last",
        "steps",
        "log-interval",
        "full-batch",
        "wide-batch",
        "bare",
        "weighted-loss",
        "smooth-loss",
        "own-loss",
    ],
)
def test_every_kind_of_job_gives_the_references_result(engine, options):
    training = make_training("batchnorm", "fedlalr", **options)
    assert_same_outcomes(federate(engine, training), federate("reference", training))


@engines
@pytest.mark.parametrize("rules", [{"weighting": "samples"}, {"buffers": "recalibrate"}])
def test_every_server_rule_gives_the_references_result(engine, rules):
    training = make_training()
    assert_same_outcomes(federate(engine, training, **rules), federate("reference", training, **rules))


@engines
def test_clients_that_are_data_sets_give_the_references_result(engine):
    training = make_training()
    pool = training.clients
    datasets = [torch.utils.data.TensorDataset(pool.inputs[rows], pool.targets[rows]) for rows in pool.partition]
    training = replace(training, clients=DatasetClients(datasets))
    assert_same_outcomes(federate(engine, training), federate("reference", training))


@engines
def test_a_client_with_a_nan_is_refused_and_disturbs_no_other(engine):
    training = make_training()
    training.clients.inputs[training.clients.partition[2][0]] = float("nan")
    given, wanted = federate(engine, training, cohort=6), federate("reference", training, cohort=6)
    assert [rejection.client for rejection in wanted[0].rejected] == [2]
    assert_same_outcomes(given, wanted)


@engines
def test_a_client_that_raises_is_named_and_the_others_go_on(engine):
    training = make_training("batchnorm", sizes=(7, 12, 6, 1, 10, 23))  # one sample: BatchNorm refuses it
    given, wanted = federate(engine, training, cohort=6), federate("reference", training, cohort=6)
    assert [rejection.client for rejection in wanted[0].rejected] == [3]
    assert_same_outcomes(given, wanted)


class Norms:
    """A probe that looks at every slot of two clients."""

    def __init__(self) -> None:
        self.clients = frozenset({1, 4})

    def measure(self, state, context):
        return {name: float(value.norm()) for name, value in state.items()} | {
            "step": float(context.step),
            "steps": float(context.steps),
            "dimensions": float(state.x.dim()),
        }


@engines
def test_probes_see_what_they_see_on_the_reference(engine):
    training = make_training()
    traces = {}
    for name in (engine, "reference"):
        with started(name, training) as (chosen, private):
            state = initial_state(private)
            outcome = play_round(state, torch.arange(6), 0.1, chosen, private, Rules(), Norms())
        traces[name] = outcome.traces
    assert [trace[:2] for trace in traces[engine]] == [trace[:2] for trace in traces["reference"]]
    assert len(traces["reference"]) == 2 * 3 + 2 * 3
    for mine, right in zip(traces[engine], traces["reference"], strict=True):
        assert mine.values == pytest.approx(right.values, rel=TOLERANCE)
