"""FedProx: local SGD with a pull towards the broadcast model.

    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x                                                            # start
            for k = 1 … K, with a fresh mini-batch gradient g:                 # step
                x_i = x_i − η_t (g + µ (x_i − x))
            send x_i                                                           # finish
        x = mean x_i  over S                                                   # update

g + µ (x_i − x) is the gradient of the client's loss plus (µ/2) ‖x_i − x‖². µ = 0 is FedAvg.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. "Federated Optimization in Heterogeneous Networks". MLSys 2020. arXiv
1812.06127.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Checked, NotNegative, Positive


@dataclass(frozen=True)
class FedProx(Checked):
    """Local SGD with a proximal term, the clients' models averaged."""

    lr: Positive = 0.1
    mu: NotNegative = 0.01

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x",), up={"x": "mean"})

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return Slots(x=client.x - context.lr * (gradient + self.mu * (client.x - broadcast.x)))

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return client, Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return reduced
