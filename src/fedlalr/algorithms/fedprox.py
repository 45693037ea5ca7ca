"""FedProx: local SGD with a pull towards the broadcast model.

    for round t = 1, 2, …:
        each client i of the cohort S:
            x_i = x                                                            # start, as in FedAvg
            for k = 1 … K, with a fresh mini-batch gradient g:                 # step
                x_i = x_i − η_t (g + µ (x_i − x))
            send x_i                                                           # finish, as in FedAvg
        x = mean x_i  over S                                                   # update, as in FedAvg

g + µ (x_i − x) is the gradient of the client's loss plus (µ/2) ‖x_i − x‖². µ = 0 is FedAvg.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. "Federated Optimization in Heterogeneous Networks". MLSys 2020. arXiv
1812.06127.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.option_types import NotNegative


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Local SGD with a proximal term, the clients' models averaged."""

    mu: NotNegative = 0.01

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        return Slots(x=client.x - context.lr * (gradient + self.mu * (client.x - broadcast.x)))
