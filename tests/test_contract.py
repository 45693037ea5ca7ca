"""The contract of every registered algorithm: shapes, dtypes, determinism, order, serialisation, bytes."""

from __future__ import annotations

import pickle
from functools import cache

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn

import fedlalr as fl
from conftest import make_clients, make_model
from variants import VARIANTS

VECTORS = {  # model-sized vectors (down, up) of each method, from its paper
    "fedlalr": (3, 3),
    "fedlalr restart": (2, 2),
    "fedlalr max": (3, 3),
    "fedlalr restart max": (2, 2),
    "fedlalr bias correction": (3, 3),
    "alignedlalr": (3, 2),
    "alignedlalr unaligned": (2, 2),
    "alignedlalr unaligned mean": (2, 2),
    "alignedlalr keep": (3, 2),
    "alignedlalr keep mean": (3, 2),
    "fedavg": (1, 1),
    "fedadam": (1, 1),
    "fedamsv1": (1, 1),
    "fedamsv2": (1, 1),
    "lafedopt": (1, 1),
    "lafedopt local": (1, 1),
    "lafedopt joint": (1, 2),
    "lafedopt joint adam": (1, 2),
    "lafedopt adam": (1, 1),
    "adaalter": (2, 2),
    "sharedamsgrad": (4, 3),
    "fedcm": (2, 1),
    "slowmo": (1, 1),
    "fedprox": (1, 1),
    "scaffold": (2, 2),
    "fednova": (1, 1),
    "fedadagrad": (1, 1),
    "fedyogi": (1, 1),
    "fedavgm": (1, 1),
    "fedlada": (3, 2),
    "localadam": (1, 1),
    "localadam restart": (1, 1),
    "localadam average": (3, 3),
    "diloco": (1, 1),
    "fedadamw": (2, 1),
    "fedmuon": (3, 2),
    "fedadamw unaligned": (1, 1),
    "fedadamw whole": (3, 2),
    "fedadamw whole unaligned": (2, 2),
    "mimelite": (2, 2),
    "mimelite adam": (3, 2),
    "deltasgd": (1, 1),
}

BLOCKS = {
    "localadam average": (1, 0),
    "fedadamw": (2, 1),
    "fedadamw unaligned": (2, 1),
    "fedadamw whole": (1, 0),
    "fedadamw whole unaligned": (1, 0),
}
"""Slots (down, up) with one number for each parameter tensor."""

every = pytest.mark.parametrize("name", VARIANTS)


def run(name: str, **options: object) -> fl.Result:
    settings = {
        "rounds": 2,
        "local": fl.Steps(3),
        "batch_size": 4,
        "weight_decay": 1e-3,
        "schedule": fl.schedules.Exponential(0.9),
    }
    model = options.pop("model", None) or make_model()
    return fl.run(
        model, options.pop("clients", make_clients()), VARIANTS[name], engine="reference", **(settings | options)
    )


@cache
def usual(name: str) -> fl.Result:
    """The result that several tests look at."""
    return run(name)


def same(first: fl.Result, second: fl.Result) -> bool:
    return all(torch.equal(value, second.state[s][n]) for s, slot in first.state.items() for n, value in slot.items())


@every
def test_slots_have_the_shape_and_dtype_of_the_parameters(name):
    result = usual(name)
    parameters = dict(make_model().named_parameters())
    assert "x" in result.state
    for slot in result.state.values():
        assert list(slot) == list(parameters)
        assert all(value.shape == parameters[n].shape and value.dtype == torch.float64 for n, value in slot.items())


@every
def test_the_same_seed_repeats_the_run_and_another_seed_does_not(name):
    first = run(name, seed=1, clients_per_round=3)
    assert same(first, run(name, seed=1, clients_per_round=3))
    assert not same(first, run(name, seed=2, clients_per_round=3))


@every
def test_the_order_of_the_clients_does_not_matter(name):
    clients = make_clients()
    first = run(name, batch_size=None, clients=clients)
    second = run(name, batch_size=None, clients=clients[::-1])
    for slot in first.state:
        for parameter, value in first.state[slot].items():
            torch.testing.assert_close(value, second.state[slot][parameter], rtol=1e-10, atol=1e-13)


@every
def test_the_state_survives_serialisation(name):
    state: dict[str, dict[str, Tensor]] = usual(name).state
    named = {f"{slot}/{n}": value for slot, values in state.items() for n, value in values.items()}
    assert all(torch.equal(value, named[key]) for key, value in load(save(named)).items())
    slots = VARIANTS[name].init(torch.ones(3))
    back = pickle.loads(pickle.dumps(slots))
    assert list(back) == list(slots)
    assert all(torch.equal(back[slot], slots[slot]) for slot in slots)


@every
def test_bytes_follow_from_the_slot_table(name):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    parameters = sum(p.numel() for p in model.parameters())
    record = run(name, model=model, clients_per_round=3, batch_size=5).history[0]
    tensors, statistics = len(list(model.parameters())), 6 + 6 + 1
    down, up = (
        vectors * parameters + blocks * tensors
        for vectors, blocks in zip(VECTORS[name], BLOCKS.get(name, (0, 0)), strict=True)
    )
    assert record.bytes_down == 3 * (down + statistics) * 8
    assert record.bytes_up == 3 * (up + statistics) * 8


@every
def test_float32_stays_float32(name):
    clients = [(x.float(), y) for x, y in make_clients()]
    result = run(name, model=make_model().float(), clients=clients)
    assert {value.dtype for slot in result.state.values() for value in slot.values()} == {torch.float32}


def test_every_registered_algorithm_has_its_vectors_stated():
    assert set(VECTORS) == set(VARIANTS)
