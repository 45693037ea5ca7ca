"""FedNova: local SGD with every client's change divided by its number of steps before averaging.

    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x                                                            # start
            for k = 1 … K_i, with a fresh mini-batch gradient g:               # step
                x_i = x_i − η_t g
            send d_i = (x_i − x) / K_i                                         # finish
        x = x + K mean d_i  over S,  K the mean of K_i over S                  # update

The slot of d_i is `direction`. Both means use the same weights (uniform, or by samples as in the paper). If all K_i
are equal, this is FedAvg.

Wang, Liu, Liang, Joshi, Poor. "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization".
NeurIPS 2020. arXiv 2007.07481.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.common.option_types import Positive


@dataclass(frozen=True)
class FedNova(FedAvg):
    """Local SGD, changes normalised by the number of local steps."""

    lr: Positive = 0.1

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x",), up={"direction": "mean"})

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return Slots(x=client.x - context.lr * gradient)  # not FedAvg's, whose fused form rounds differently

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return Slots(direction=(client.x - broadcast.x) / context.steps), Slots()

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        return Slots(x=server.x + context.steps * reduced.direction)
