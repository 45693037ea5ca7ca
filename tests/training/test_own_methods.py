"""Methods as a user may write them give the reference's result on every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fedlalr as fl
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.training import Training
from fedlalr.training.stacked.cuda_graphs import StaticSteps
from fedlalr.training.stacked.engine import StackedEngine


@dataclass(frozen=True)
class Own:
    """SGD, for others to change."""

    lr: float = 0.05
    slots = SlotTable(down=("x",), up={"x": "mean"})

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return client.replace(x=client.x - context.lr * gradient)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return client, Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return reduced


class HandsTheBroadcastOn(Own):
    """A step gives back the broadcast m, which is not stacked, as a slot of the client's."""

    slots = SlotTable(down=("x", "m"), up={"x": "mean", "moved": "mean"})

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, m=torch.zeros_like(params))

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x, m=broadcast.m)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return Slots(x=client.x - context.lr * (gradient + 0.5 * client.m), m=broadcast.m)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return Slots(x=client.x, moved=broadcast.x - client.x), Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return Slots(x=reduced.x, m=reduced.moved)


class Exchanges(Own):
    """A step hands x on under another name, beside one number for all coordinates."""

    slots = SlotTable(down=("x", "y"), up={"x": "mean", "y": "mean"})

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, y=0.9 * params)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x, y=broadcast.y, length=broadcast.x[..., :1])

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        length = 0.9 * client.length + gradient.norm(dim=-1, keepdim=True)
        return Slots(x=client.y - context.lr * gradient, y=client.x, length=length)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return Slots(x=client.x * (1 + 0.01 * client.length), y=client.y), Slots()


class KeepsAndSendsConstants(Own):
    """Keeps two slots, sends maxima, and sends and keeps what is the same for all clients."""

    slots = SlotTable(
        down=("x", "most"), up={"x": "mean", "most": "max", "steps": "max", "old": "mean"}, kept=("one", "sum")
    )

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params, most=torch.full_like(params, 0.01))

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return kept.replace(x=broadcast.x, most=broadcast.most)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return client.replace(
            x=client.x - context.lr * gradient / (1 + client.one),
            most=torch.maximum(client.most, gradient.abs()),
            sum=client.sum + context.step * gradient,
        )

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        ones = torch.ones_like(broadcast.x)
        upload = Slots(x=client.x - 0.01 * client.sum, most=client.most, steps=ones * context.steps, old=broadcast.x)
        return upload, Slots(one=ones, sum=client.sum / context.steps)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return Slots(x=reduced.x + 0.001 * reduced.steps * (1 + reduced.old - server.x), most=reduced.most)


class Counts(Own):
    """Says that it keeps one number, but keeps one for each coordinate."""

    slots = SlotTable(down=("x",), up={"x": "mean"}, kept=("n",), counts=("n",))

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return client, Slots(n=context.steps * torch.ones_like(client.x))


@pytest.mark.parametrize("engine", ["reference", "stacked"])
def test_a_count_for_each_coordinate_is_an_error_that_names_the_slot(engine: str) -> None:
    clients = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(2)]
    with pytest.raises((ValueError, fl.RoundFailed), match=r"a client of Counts keeps 1 numbers of n, but .* \[.*8\]"):
        fl.run(nn.Linear(3, 2), clients, Counts(), rounds=2, engine=engine)


def in_fixed_memory(training: Training) -> StackedEngine:
    """The stacked engine as a GPU runs it, without capturing."""
    engine = StackedEngine(training)
    engine._static = StaticSteps(training, engine._gradient, engine._fused, capture=False)
    return engine


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", [HandsTheBroadcastOn(), Exchanges(), KeepsAndSendsConstants()], ids=repr)
@pytest.mark.parametrize("engine", ["stacked", in_fixed_memory, "workers"])
@pytest.mark.parametrize("sizes", [(2, 9), (4, 3, 9, 1, 4)])
def test_a_method_of_ones_own_gives_the_references_result(
    method: Own, engine: str | Callable[[Training], StackedEngine], sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    clients = [(torch.randn(count, 3, dtype=torch.float64), torch.arange(count) % 2) for count in sizes]
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)).double()
    settings = {"rounds": 3, "local": fl.Epochs(1), "batch_size": 2, "device": "cpu", "max_norm_ratio": None}
    wanted = fl.run(model, clients, method, engine="reference", **settings)
    given = fl.run(model, clients, method, engine=engine, **settings)
    for slot, named in wanted.state.items():
        for name, tensor in named.items():
            torch.testing.assert_close(given.state[slot][name], tensor, rtol=1e-10, atol=1e-12)
