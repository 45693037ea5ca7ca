"""Chains of linear layers on a CPU: however many clients go together, the result is the reference engine's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedlalr.data.population import Population
from fedlalr.training import linear_rounds
from fedlalr.training.layout import Layout
from fedlalr.training.linear_rounds import Layers, clip
from fedlalr.training.stacked import StackedEngine
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


def test_clipping_takes_the_norm_over_all_layers_of_a_client():
    gradients = [torch.tensor([[3.0], [0.3]]), torch.tensor([[[4.0]], [[0.4]]])]
    clip(gradients, 1.0)
    torch.testing.assert_close(gradients[0], torch.tensor([[0.6], [0.3]]))
    torch.testing.assert_close(gradients[1], torch.tensor([[[0.8]], [[0.4]]]))
