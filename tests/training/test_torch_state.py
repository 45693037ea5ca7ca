"""Copies of modules that keep tensors from their last forward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients
from fedlalr.training.torch_state import copied


class Attentive(nn.Module):
    """Keeps an intermediate result for later inspection."""

    def __init__(self):
        super().__init__()
        self.inner, self.maps, self.last = nn.Linear(4, 3), [], None

    def forward(self, inputs):
        outputs = self.inner(inputs)
        self.last, self.maps = outputs, [{"weights": (outputs.softmax(1),)}]
        return outputs


class Sliced(nn.Module):
    """Keeps a part of its parameter from the start, which training would not reach."""

    def __init__(self):
        super().__init__()
        self.whole = nn.Parameter(torch.randn(6, 4))
        self.head = self.whole[:3]

    def forward(self, inputs):
        return inputs @ self.head.mT


MODULES = {
    "attentive": Attentive,
    "spectral norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(4, 3)),
    "parametrized": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, "auto") for name in MODULES] + [("attentive", "workers:2"), ("spectral norm", "workers:2")],
)
def test_a_module_that_keeps_what_it_computed_is_trained_and_given_back(name, engine):
    torch.manual_seed(0)
    model = MODULES[name]().double()
    settings = {"rounds": 2, "batch_size": 4, "device": "cpu"}
    one, other = (fl.run(model, make_clients(), fl.FedAvg(lr=0.1), engine=e, **settings) for e in ("reference", engine))
    for parameter, value in one.state["x"].items():
        assert (value - model.get_parameter(parameter)).abs().max() > 1e-3
        assert (value - other.state["x"][parameter]).abs().max() < 1e-10
        assert torch.equal(one.model.get_parameter(parameter), value)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("make", [Sliced, lambda: torch.nn.utils.weight_norm(nn.Linear(4, 3))])
def test_a_module_with_a_part_that_training_would_not_reach_is_rejected(make):
    with pytest.raises(ValueError, match=r"keeps a tensor computed from its parameters.* compute it in forward"):
        fl.run(make(), make_clients(), fl.FedAvg())


def test_what_holds_itself_can_be_copied():
    model = Attentive()
    model.maps.append(model.maps)
    assert copied(model).maps[0] is not model.maps


def test_a_copy_has_its_own_numbers_and_no_graph():
    model = Attentive()
    model(torch.randn(2, 4))
    other = copied(model)
    assert other.last.grad_fn is None
    assert torch.equal(other.maps[0]["weights"][0], model.maps[0]["weights"][0])
    other.last.zero_()
    assert model.last.abs().sum() > 0
    assert other.inner.weight is not model.inner.weight
