"""Personal parameters and local buffers give the same on every engine, around any algorithm."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from closeness import assert_close, difference
from fedlalr.federation.round import RoundOutcome, Rules, run_round
from fedlalr.federation.sampling import sample
from fedlalr.federation.session import initial_state
from fedlalr.training.layout import Division, Layout
from fedlalr.training.personal import SLOT
from fedlalr.training.stacked.cuda_graphs import StaticSteps
from training.jobs import federate, make_training, started
from variants import VARIANTS

pytestmark = pytest.mark.filterwarnings("error")

HEAD = {"personal": ("3.*",)}
FEDBN = {"personal": ("1.*", "5.*"), "buffers": "local"}
TOLERANCE = 1e-12
JOBS = [
    ("perceptron", "fedlalr", HEAD, "stacked"),
    ("perceptron", "fedlalr", HEAD, "workers"),
    ("perceptron", "fedprox", HEAD, "stacked"),
    ("perceptron", "scaffold", HEAD, "stacked"),
    ("perceptron", "scaffold", HEAD, "workers"),
    ("perceptron", "scaffold", HEAD, "distributed:stacked"),
    ("perceptron", "fedavg", HEAD, "stacked"),
    ("perceptron", "lafedopt", HEAD, "stacked"),
    ("perceptron", "fedlalr restart max", HEAD, "stacked"),
    ("perceptron", "fedadamw unaligned", HEAD, "stacked"),
    ("perceptron", "localadam average", HEAD, "stacked"),
    ("perceptron", "mimelite", {"personal": ("1.bias", "3.weight")}, "stacked"),
    ("perceptron", "deltasgd", HEAD, "stacked"),
    ("batchnorm", "fedlalr", FEDBN, "stacked"),
    ("batchnorm", "fedlalr", FEDBN, "workers"),
    ("batchnorm", "fedprox", FEDBN, "stacked"),
    ("batchnorm", "scaffold", {"buffers": "local"}, "stacked"),
    ("batchnorm", "adaalter", {"personal": ("1.*",)}, "distributed:stacked"),
]


def assert_same(given: list[RoundOutcome], wanted: list[RoundOutcome]) -> None:
    """Every slot, buffer and kept value of every round."""
    for mine, right in zip(given, wanted, strict=True):
        assert not mine.rejected
        assert set(mine.state.kept) == set(right.state.kept)
        pairs = [(mine.state.slots, right.state.slots), (mine.state.buffers, right.state.buffers)]
        pairs += [(mine.state.kept[client], kept) for client, kept in right.state.kept.items()]
        for one, other in pairs:
            assert set(one) == set(other)
            worst = {name: difference(one[name], other[name]) for name in other}
            assert max(worst.values(), default=0.0) <= TOLERANCE, worst


@pytest.mark.parametrize(("model", "algorithm", "options", "engine"), JOBS)
def test_every_engine_gives_the_references_result(model, algorithm, options, engine):
    training = make_training(model, algorithm, **options)
    assert_same(federate(engine, training), federate("reference", training))


@pytest.mark.parametrize("algorithm", ["fedprox", "scaffold", "fedlalr"])
def test_steps_in_fixed_memory_give_the_references_result(algorithm):
    sizes = (6, 8, 10, 12, 14, 16, 18, 20)
    training = make_training("batchnorm", algorithm, sizes=sizes, **FEDBN)
    with started("stacked", training) as (engine, private):
        engine._static = StaticSteps(private, engine._gradient, engine._fused, capture=False)
        state, given = initial_state(private), []
        for t, cohort in ((1, 7), (2, 5)):
            clients = sample(len(private.clients), cohort, private.seed, t)
            given.append(run_round(state, clients, 0.05, engine, private, Rules()))
            state = given[-1].state
    with started("reference", training) as (engine, private):
        state, wanted = initial_state(private), []
        for t, cohort in ((1, 7), (2, 5)):
            clients = sample(len(private.clients), cohort, private.seed, t)
            wanted.append(run_round(state, clients, 0.05, engine, private, Rules()))
            state = wanted[-1].state
    assert_same(given, wanted)


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_a_federation_of_one_does_not_notice_personal_parameters(algorithm):
    """Every slot of a personal coordinate, also one that only the server has, follows the algorithm's own update."""
    training = make_training("perceptron", algorithm, sizes=(9,))
    whole = federate("reference", training, rounds=3, cohort=1)[-1].state
    apart = replace(training, personal=("1.weight", "3.bias"))
    own = federate("reference", apart, rounds=3, cohort=1)[-1].state
    division, first = apart.division, initial_state(apart).slots
    for name, wanted in whole.slots.items():
        assert_close(division.join(division.cut(own.slots[name], personal=False), own.kept[0][SLOT + name]), wanted)
        kept = division.cut(own.slots[name], personal=True)
        assert torch.equal(kept, division.cut(first[name], personal=True))  # what a new client starts with


def test_a_layout_is_cut_and_joined_again():
    layout = Layout.of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1)))
    division = Division.of(layout, ("0.bias", "1.weight", "1.bias", "2.bias"))
    assert division.personal.names == ("0.bias", "1.weight", "1.bias", "2.bias")
    assert division.shared.names == ("0.weight", "2.weight")
    stack = torch.arange(2.0 * layout.size).view(2, -1)
    shared, own = division.cut(stack, personal=False), division.cut(stack, personal=True)
    assert (shared.shape, own.shape) == ((2, 8), (2, 12))
    assert torch.equal(division.join(shared, own), stack)
    mixed = layout.views(division.join(shared[0], own)[1])
    assert torch.equal(mixed["0.weight"], layout.views(stack)["0.weight"][0])
    assert torch.equal(mixed["0.bias"], layout.views(stack)["0.bias"][1])
    assert torch.equal(division.shared.views(shared)["2.weight"], layout.views(stack)["2.weight"])
