"""A small federation that covers everything an engine must handle, and a comparison of two engines on it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from closeness import difference
from conftest import set_seed
from fedlalr.data.population import as_clients
from fedlalr.federation.round import RoundOutcome, Rules, ServerState, run_round
from fedlalr.federation.sampling import sample
from fedlalr.federation.session import initial_state
from fedlalr.training import Engine, Epochs, Training
from fedlalr.training.engines.registry import ENGINES
from fedlalr.training.layout import Layout
from variants import VARIANTS

TOLERANCE = 1e-10

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
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    ),
}


def make_training(model: str = "batchnorm", algorithm: str = "fedlalr", **options: object) -> Training:
    set_seed(1)
    module = MODELS[model]().double()
    sizes = options.pop("sizes", (7, 12, 6, 10, 11, 23))  # no batch of a single sample, which BatchNorm rejects
    generator = torch.Generator().manual_seed(2)
    clients = [
        (
            torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 3, (n,), generator=generator),
        )
        for n in sizes
    ]
    settings = {
        "local": Epochs(1),
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
    kind, _, inner = name.partition(":")
    engine = ENGINES[kind](training, inner) if inner else ENGINES[kind](training)
    try:
        yield engine, training
    finally:
        engine.close()


def federate(name: str, training: Training, rounds: int = 2, cohort: int = 4, **rules: object) -> list[RoundOutcome]:
    with started(name, training) as (engine, private):
        state, outcomes = initial_state(private), []
        for t in range(1, rounds + 1):
            clients = sample(len(private.clients), cohort, private.seed, t)
            outcomes.append(run_round(state, clients, 0.9**t * 0.05, engine, private, Rules(**rules)))
            state = outcomes[-1].state
    return outcomes


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


def assert_same_outcomes(given: list[RoundOutcome], wanted: list[RoundOutcome]) -> None:
    for mine, right in zip(given, wanted, strict=True):
        assert_same_state(mine.state, right.state)
        assert mine.train_loss == pytest.approx(right.train_loss, rel=TOLERANCE)
        assert (mine.replied, mine.accepted, mine.rejected) == (right.replied, right.accepted, right.rejected)
