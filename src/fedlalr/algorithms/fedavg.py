"""FedAvg: local SGD, averaged.

    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x                                                            # start
            for k = 1 … K, with a fresh mini-batch gradient g:                 # step
                x_i = x_i − η_t g
            send x_i                                                           # finish
        x = mean x_i  over S                                                   # update

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. "Communication-Efficient Learning of Deep Networks from Decentralized
Data". AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Checked, Positive


@dataclass(frozen=True)
class FedAvg(Checked):
    """Local SGD, the clients' models averaged. Other methods derive from it and override what they do differently."""

    lr: Positive = 0.1

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x",), up={"x": "mean"})

    def init(self, params: Tensor) -> Slots:
        return Slots(x=params)

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        return Slots(x=broadcast.x)

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return Slots(x=client.x - context.lr * gradient)

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        table = self.slots
        return client.only(*table.up), client.only(*table.kept)

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return reduced
