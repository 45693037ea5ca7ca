"""Methods that ask for a second gradient of their mini-batch get it on every engine, and nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedlalr as fl
from fedlalr.training.stacked.cuda_graphs import draws
from training.jobs import MODELS, assert_same_outcomes, federate, make_training

ENGINES = ["reference", "stacked", "workers"]


@dataclass(frozen=True)
class Watched(fl.FedAvg):
    """FedAvg that also asks for the gradient at its own x, at the broadcast one and at x again, and sends means of how
    far those at x are from the one of the step, and of the other."""

    @property
    def slots(self) -> fl.SlotTable:
        up = {"x": "mean", "same": "mean", "start": "mean"}
        return fl.SlotTable(down=("x",), up=up, gradients={"g_same": "x", "g_start": "x_start", "g_again": "x"})

    def init(self, params: Tensor) -> fl.Slots:
        return fl.Slots(x=params, same=torch.zeros_like(params), start=torch.zeros_like(params))

    def start(self, broadcast: fl.Slots, kept: fl.Slots) -> fl.Slots:
        x, nothing = broadcast.x, torch.zeros_like(broadcast.x)
        asked = dict.fromkeys(("g_same", "g_start", "g_again"), nothing)
        return fl.Slots(x=x, x_start=x, same=nothing, start=nothing, **asked)

    def step(self, client: fl.Slots, gradient: Tensor, broadcast: fl.Slots, context: fl.Context) -> fl.Slots:
        same = client.same + (gradient - client.g_same).abs() + (gradient - client.g_again).abs()
        return client.replace(x=client.x - context.lr * gradient, same=same, start=client.start + client.g_start)

    def finish(self, client: fl.Slots, broadcast: fl.Slots, context: fl.Context) -> tuple[fl.Slots, fl.Slots]:
        return fl.Slots(x=client.x, same=client.same, start=client.start / context.steps), fl.Slots()

    def update(self, server: fl.Slots, reduced: fl.Slots, context: fl.Context) -> fl.Slots:
        return reduced


def client(count: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    return inputs, torch.arange(count) % 3


CLIENTS = [client(count) for count in (8, 12, 4)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def trained(algorithm: fl.Algorithm, engine: str, **options: object) -> fl.federation.run.Result:
    settings = {"rounds": 1, "batch_size": 4, "local": fl.Epochs(2), "device": "cpu", "weight_decay": 0.01}
    return fl.run(network(), CLIENTS, algorithm, engine=engine, **(settings | options))


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.flatten() for value in named.values()])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_gradient_requested_at_x_is_the_gradient_and_leaves_the_run_alone(
    engine: str, clip_norm: float | None
) -> None:
    mine = trained(Watched(lr=0.1), engine, clip_norm=clip_norm)
    plain = trained(fl.FedAvg(lr=0.1), "reference", clip_norm=clip_norm)
    assert flat(mine.state["same"]).max() < 1e-15
    torch.testing.assert_close(flat(mine.state["x"]), flat(plain.state["x"]), rtol=1e-12, atol=1e-14)
    for name, buffer in plain.model.named_buffers():
        torch.testing.assert_close(dict(mine.model.named_buffers())[name], buffer, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ENGINES)
def test_dropout_leaves_out_the_same_numbers_in_both_gradients(engine: str) -> None:
    model = nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.5), nn.Linear(40, 3)).double()
    settings = {"rounds": 1, "batch_size": 4, "local": fl.Epochs(2), "device": "cpu"}
    mine = fl.run(model, CLIENTS, Watched(lr=0.1), engine=engine, **settings)
    plain = fl.run(model, CLIENTS, fl.FedAvg(lr=0.1), engine=engine, **settings)
    assert flat(mine.state["same"]).max() < 1e-15
    torch.testing.assert_close(flat(mine.state["x"]), flat(plain.state["x"]), rtol=1e-12, atol=1e-14)


class Remembering(nn.Module):
    """Shifts its input by a running mean of what it has seen, which it keeps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(0.1 * inputs.detach().mean(0))
        return inputs - self.seen


@pytest.mark.parametrize("engine", ENGINES)
def test_every_gradient_of_a_batch_begins_with_the_same_buffers(engine: str) -> None:
    model = nn.Sequential(Remembering(), nn.Linear(5, 3)).double()
    clients = [client(8), client(8)]  # of one size: a running mean would know padding
    settings = {"rounds": 1, "batch_size": 4, "local": fl.Epochs(2), "device": "cpu"}
    mine = fl.run(model, clients, Watched(lr=0.1), engine=engine, **settings)
    assert flat(mine.state["same"]).max() < 1e-15


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gradient_requested_at_the_broadcast_is_the_whole_gradient_over_whole_passes(engine: str) -> None:
    model = nn.Sequential(nn.Linear(5, 3)).double()
    settings = {"rounds": 1, "batch_size": 4, "local": fl.Epochs(2), "device": "cpu"}
    mine = fl.run(model, CLIENTS, Watched(lr=0.1), engine=engine, **settings).state["start"]
    right = [
        torch.autograd.grad(nn.functional.cross_entropy(model(inputs), targets), list(model.parameters()))
        for inputs, targets in CLIENTS
    ]
    means = [torch.stack(parts).mean(0) for parts in zip(*right, strict=True)]
    torch.testing.assert_close(flat(mine), torch.cat([part.flatten() for part in means]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("engine", ["stacked", "workers"])
@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("algorithm", ["deltasgd", "mimelite"])
def test_both_methods_give_the_references_result_on_every_network(engine: str, model: str, algorithm: str) -> None:
    training = make_training(model, algorithm)
    assert_same_outcomes(federate(engine, training), federate("reference", training))


@pytest.mark.parametrize("decay", [0.0, 100.0])
def test_step_sizes_of_delta_sgd_follow_the_clients_own_smoothness(decay: float) -> None:
    """On quadratics of curvature L the first estimate is γ/(2L) = 1/L, which ends at the minimum in that step.

    Decoupled weight decay moves x by itself, so that of x₁ it leaves x₁ (1 − ηλ) − x₁, but it tells nothing about L.
    """
    lr = 1e-3
    inputs = [curvature**0.5 * torch.ones(1, 1, dtype=torch.float64) for curvature in (0.5, 50.0)]
    clients = [(x, torch.zeros(1, 1, dtype=torch.float64)) for x in inputs]
    model = nn.Linear(1, 1, bias=False).double()
    for one in clients:
        result = fl.run(
            model,
            [one],
            fl.DeltaSGD(lr=lr, delta=1e9),
            loss=lambda outputs, targets: 0.5 * (outputs - targets).square().mean(),
            rounds=1,
            local=fl.Steps(2),
            batch_size=None,
            decoupled_weight_decay=decay,
            engine="reference",
            device="cpu",
        )
        curvature = float(one[0].square())
        first = float(model.weight.detach()) * (1 - lr * decay - lr * curvature)
        assert float(result.state["x"]["weight"]) == pytest.approx(-lr * decay * first, abs=1e-12)


class HostNoise(nn.Module):
    """Draws from a generator outside torch."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * (1 + self.draw())


@pytest.mark.parametrize(
    ("layer", "whether"),
    [
        (nn.Dropout(0.5), True),
        (HostNoise(random.random), True),
        (HostNoise(np.random.rand), True),
        (nn.Tanh(), False),
        (nn.BatchNorm1d(6), False),
    ],
)
def test_a_module_that_draws_in_training_is_known(layer: nn.Module, whether: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 6), layer, nn.Linear(6, 3)).double()
    training = replace(make_training(), model=model)
    buffers = {name: buffer.clone() for name, buffer in training.model.named_buffers()}
    before = torch.get_rng_state()
    assert draws(training) is whether
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in training.model.named_buffers())


def test_a_module_that_needs_the_labels_gets_them_when_its_draws_are_looked_for() -> None:
    class Own(nn.Linear):
        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
            return {"loss": nn.functional.cross_entropy(super().forward(inputs.flatten(1)), labels)}

    assert draws(replace(make_training(), model=Own(36, 3).double(), loss="model")) is False


def test_a_table_that_requests_gradients_at_a_slot_that_is_not_there_is_rejected() -> None:
    class Nowhere(fl.FedAvg):
        @property
        def slots(self) -> fl.SlotTable:
            return fl.SlotTable(down=("x",), up={"x": "mean"}, gradients={"g": "y"})

    with pytest.raises(ValueError, match=r"requests the gradients \{'g': 'y'\}, but its start returns no 'g'"):
        trained(Nowhere(lr=0.1), "reference")
