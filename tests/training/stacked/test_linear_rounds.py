"""Chains of linear layers on a CPU: however many clients go together, the result is the reference engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedlalr.data.population import Population
from fedlalr.federation.session import initial_state
from fedlalr.training.interfaces import Work
from fedlalr.training.layout import Layout
from fedlalr.training.stacked import linear_rounds
from fedlalr.training.stacked.engine import StackedEngine
from fedlalr.training.stacked.linear_rounds import Layers, clip
from training.jobs import assert_same_outcomes, federate, make_training

pytestmark = pytest.mark.filterwarnings("error")

BARE = {"clip_norm": None, "weight_decay": 0.0, "decoupled_weight_decay": 0.0}


@pytest.mark.parametrize("cache", [1, 30_000, 1 << 30], ids=["one by one", "some", "all"])
@pytest.mark.parametrize("algorithm", ["fedlalr", "fedlalr restart max", "fedavg", "fedadam"])
@pytest.mark.parametrize("options", [{}, BARE, {"sizes": (8,) * 6}], ids=["ragged", "bare", "equal"])
def test_groups_of_any_size_give_the_references_result(monkeypatch, cache, algorithm, options):
    monkeypatch.setattr(linear_rounds, "CACHE", cache)
    training = make_training("perceptron", algorithm, **options)
    assert StackedEngine(training)._linear is not None
    assert_same_outcomes(federate("stacked", training), federate("reference", training))


@pytest.mark.parametrize("algorithm", ["fedlalr", "mimelite"])  # with the round prepared, and step by step
def test_a_batch_of_ignored_labels_alone_moves_nothing_and_gives_the_references_result(algorithm):
    training = make_training("logistic", algorithm, batch_size=2, sizes=(7, 4, 9, 6))
    rows = training.clients.partition
    training.clients.targets[rows[1]] = -100  # no label at all, and so no loss
    training.clients.targets[rows[3][2:]] = -100  # and some
    given, wanted = (federate(engine, training, cohort=4) for engine in ("stacked", "reference"))
    assert_same_outcomes(given, wanted)
    assert all(not outcome.rejected for outcome in given)


@pytest.mark.parametrize("cache", [1, 30_000, 1 << 30], ids=["one by one", "some", "all"])
@pytest.mark.parametrize("options", [{}, BARE], ids=["around", "bare"])
def test_clients_without_a_step_have_no_part_in_the_losses(monkeypatch, cache, options):
    class OfTheLarger:
        def steps(self, round: int, batches_per_pass: torch.Tensor) -> torch.Tensor:
            return torch.where(batches_per_pass > round, batches_per_pass, 0)  # of six clients 6, 4 and 1

    monkeypatch.setattr(linear_rounds, "CACHE", cache)
    training = make_training("perceptron", "fedavg", local=OfTheLarger(), **options)
    given, wanted = (federate(engine, training, cohort=6) for engine in ("stacked", "reference"))
    assert_same_outcomes(given, wanted)


def test_augmented_samples_give_the_references_result():
    class Shift:
        draws = 1

        def train(self, inputs: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
            return inputs + (random % 3).view(-1, 1, 1, 1)

        def test(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs

    training = make_training("logistic", "fedlalr")
    assert isinstance(training.clients, Population)
    plain = federate("stacked", training)
    training.clients.transform = Shift()
    shifted = federate("stacked", training)
    assert_same_outcomes(shifted, federate("reference", training))
    assert shifted[0].train_loss != plain[0].train_loss


def test_layers_hold_what_they_were_given():
    layout = Layout.of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    layers = Layers(layout, ("x",), 4)
    stack = torch.randn(4, layout.size)
    state = linear_rounds.Slots(x=stack)
    layers.load(state)
    assert layers.parts["x"]["0.weight"].is_contiguous()
    assert torch.equal(layers.parts["x"]["0.weight"][3], layout.views(stack[3])["0.weight"])
    assert torch.equal(layers.first(2)["x"]["1.bias"], stack[:2, -1:])
    back = state.map(torch.zeros_like)
    layers.store(back)
    assert torch.equal(back.x, stack)


@pytest.mark.parametrize("algorithm", ["fedlalr", "fedlalr restart max"])
def test_a_rounds_replies_are_not_changed_by_the_next_round(algorithm):
    training = make_training("perceptron", algorithm)
    engine = StackedEngine(training)
    broadcast = initial_state(training).slots
    work = Work(1, 0.05, torch.arange(4), broadcast, {}, linear_rounds.Slots(), 4, 6)
    replies = engine.train(work)
    copies = replies.slots.map(torch.clone)
    engine.train(replace(work, round=2))
    assert all(torch.equal(replies.slots[name], copy) for name, copy in copies.items())


def test_clipping_takes_the_norm_over_all_layers_of_a_client():
    gradients = [torch.tensor([[3.0], [0.3]]), torch.tensor([[[4.0]], [[0.4]]])]
    clip(gradients, 1.0)
    torch.testing.assert_close(gradients[0], torch.tensor([[0.6], [0.3]]))
    torch.testing.assert_close(gradients[1], torch.tensor([[[0.8]], [[0.4]]]))
