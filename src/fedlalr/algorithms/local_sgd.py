"""The client half of every server-optimiser method: SGD, then send the change of the model.

    each client i of the cohort S:
        x_i = x                                                                # start
        for k = 1 … K, with a fresh mini-batch gradient g:                     # step
            x_i = x_i − η_t g
        send Δ_i = x_i − x                                                     # finish

Clients send Δ_i, not x_i, because the server optimiser squares it: computed on the server, the difference of two
nearly equal models would have few significant digits.
"""

from __future__ import annotations

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.slots import Context, Slots, SlotTable


class LocalSGD(FedAvg):
    """Start, step and finish of a client that runs SGD and sends Δ_i; subclasses add the server half."""

    @property
    def slots(self) -> SlotTable:
        return SlotTable(down=("x",), up={"delta": "mean"})

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        return Slots(delta=client.x - broadcast.x), Slots()
