"""Images with their channels innermost: faster, and never at the price of a model that cannot run so."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedlalr as fl
from fedlalr.data.population import as_clients
from fedlalr.federation.evaluation import evaluate
from fedlalr.models import CNN
from fedlalr.training.channels_last import in_channels_last
from fedlalr.training.engines.worker_process import private_engine
from fedlalr.training.interfaces import Training
from fedlalr.training.layout import Layout


class View(nn.Module):
    """Flattens by `view`, which images with their channels innermost do not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4 * 16, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = F.max_pool2d(self.convolution(images), 2)
        return self.head(maps.view(len(maps), -1))


def images(channels: int, size: int) -> torch.Tensor:
    return torch.randn(5, channels, size, size, dtype=torch.float64)


@pytest.mark.parametrize(("model", "inputs"), [(CNN(), (1, 28)), (nn.Conv2d(3, 4, 3), (3, 8))], ids=["CNN", "bare"])
def test_outputs_are_the_models_own_and_its_parameters_keep_their_format(model: nn.Module, inputs) -> None:
    model, batch = model.double(), images(*inputs)
    strides = [parameter.stride() for parameter in model.parameters()]
    forward = in_channels_last(model, batch)
    assert forward is not None
    torch.testing.assert_close(forward(batch), model(batch), rtol=1e-12, atol=1e-12)
    assert [parameter.stride() for parameter in model.parameters()] == strides


@pytest.mark.parametrize("model", [View(), nn.Sequential(nn.Flatten(), nn.Linear(192, 3))], ids=["view", "linear"])
def test_models_without_convolutions_or_with_views_run_as_they_are(model: nn.Module) -> None:
    model, batch, targets = model.double(), images(3, 8), torch.tensor([0, 1, 2, 0, 1])
    assert in_channels_last(model, batch) is None
    found = evaluate(model, (batch, targets), F.cross_entropy)
    assert found.loss == pytest.approx(float(F.cross_entropy(model(batch), targets)), rel=1e-12)


@pytest.mark.parametrize(("model", "between"), [(CNN(3, 3, 8), 1), (View(), 9)], ids=["CNN", "view"])
def test_workers_use_the_format_only_for_models_that_run_in_it(model: nn.Module, between: int) -> None:
    training = Training(
        model=model.double(),
        layout=Layout.of(model),
        clients=as_clients([(images(3, 8), torch.tensor([0, 1, 2, 0, 1]))]),
        algorithm=fl.FedAvg(),
        loss=F.cross_entropy,
        device=torch.device("cpu"),
        local=fl.Steps(1),
        batch_size=5,
    )
    layers = private_engine(training).training.model.modules()
    weight = next(layer.weight for layer in layers if isinstance(layer, nn.Conv2d))
    assert weight.stride(1) == between  # from one channel to the next
