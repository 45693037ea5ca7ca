"""Copies of modules that keep something of their last pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fedlalr as fl
from conftest import make_clients
from fedlalr.training.copying import copied


class Attentive(nn.Module):
    """Keeps what it computed, as one does to look at it later."""

    def __init__(self):
        super().__init__()
        self.inner, self.maps, self.last = nn.Linear(4, 3), [], None

    def forward(self, inputs):
        outputs = self.inner(inputs)
        self.last, self.maps = outputs, [{"weights": (outputs.softmax(1),)}]
        return outputs


def with_hook(norm):
    return lambda: norm(nn.Linear(4, 3))


MODULES = {
    "attentive": Attentive,
    "spectral norm": with_hook(torch.nn.utils.spectral_norm),
    "weight norm": with_hook(torch.nn.utils.weight_norm),
    "parametrized": with_hook(torch.nn.utils.parametrizations.spectral_norm),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("engine", ["reference", "auto"])
def test_a_module_that_keeps_what_it_computed_is_trained_and_given_back(name, engine):
    torch.manual_seed(0)
    model = MODULES[name]().double()
    clients = make_clients()
    before = model(clients[0][0]).detach()
    result = fl.run(model, clients, fl.FedAvg(lr=0.1), rounds=2, batch_size=4, engine=engine)
    assert not torch.equal(result.model(clients[0][0]), before)


def test_a_copy_has_its_own_numbers_and_no_graph():
    model = Attentive()
    model(torch.randn(2, 4))
    other = copied(model)
    assert other.last.grad_fn is None
    assert torch.equal(other.maps[0]["weights"][0], model.maps[0]["weights"][0])
    other.last.zero_()
    assert model.last.abs().sum() > 0
    assert other.inner.weight is not model.inner.weight
