"""The options of `fl.run` on Flower: one table serves the simulator, the server and the clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import nn

from fedlalr.algorithms.slots import Algorithm
from fedlalr.common.suggestions import hint
from fedlalr.data.population import Clients
from fedlalr.federation.options import Options
from fedlalr.training import Training


class Settings(Options):
    """The options of `fl.run` that Flower knows.

    A client takes from them how it trains, the server the rest. Both must be given the same table: the server refuses
    replies of a client that trained with other settings.
    """

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Settings:
        """The settings in a table; a name that Flower cannot use is refused."""
        allowed = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in allowed:
                choices = f"{', '.join(allowed)}.{hint(name, allowed)}"
                raise TypeError(f"there is no setting {name!r} on Flower; choose from {choices}")
        return cls(**(given or {}))

    def check_exchange(self) -> None:
        """Refuse what the exchange on Flower does not do."""
        if self.buffers == "recalibrate":
            raise ValueError(
                "buffers='recalibrate' needs a second pass over the clients' data in every round, which the exchange "
                "on Flower does not make; use buffers='average'"
            )

    def training(self, model: nn.Module, algorithm: Algorithm, clients: Clients) -> Training:
        """How every client trains, once the settings are checked."""
        self.check(model, algorithm)
        self.check_exchange()
        return super().training(model, algorithm, clients)
