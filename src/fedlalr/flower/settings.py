"""The options of `fl.run` on Flower: one table serves the simulator, the server and the clients."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fedlalr.algorithms.slots import Algorithm
from fedlalr.data.population import Clients
from fedlalr.federation.robust import SlotReduction, as_reductions
from fedlalr.federation.run import choose_device, private_copy
from fedlalr.federation.screening import MAX_NORM_RATIO
from fedlalr.federation.server import Rules
from fedlalr.federation.validation import check_options
from fedlalr.training import Epochs, Interval, Training
from fedlalr.training.layout import Layout
from fedlalr.training.work import Loss


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options with the names, the meaning and the defaults that `fl.run` gives them.

    A client takes from them how it trains, the server the rest. Both must be given the same table: the server refuses
    replies of a client that trained with other settings.
    """

    rounds: int = 100
    clients_per_round: int | None = None
    local: Interval = Epochs(1)  # noqa: RUF009 - frozen
    batch_size: int | None = 50
    drop_last: bool = False
    lr_decay: float = 1.0
    lr_decay_every: int = 1
    weight_decay: float = 0.0
    decoupled_weight_decay: float = 0.0
    clip_norm: float | None = None
    weighting: Literal["uniform", "samples"] = "uniform"
    buffers: Literal["average", "recalibrate"] = "average"
    reduce: Mapping[str, str | SlotReduction | Mapping[str, object]] | None = None
    max_norm_ratio: float | None = MAX_NORM_RATIO
    min_clients: int = 1
    loss: Loss = nn.functional.cross_entropy
    seed: int = 0
    device: str | torch.device = "auto"
    dtype: torch.dtype | None = None
    run_dir: str | Path | None = None
    resume: bool = False
    checkpoint_every: int = 1

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> Settings:
        """The settings in a table; a name that Flower cannot use is refused."""
        allowed = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in allowed:
                near = difflib.get_close_matches(str(name), allowed, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise TypeError(f"there is no setting {name!r} on Flower; choose from {', '.join(allowed)}.{hint}")
        return cls(**(given or {}))

    def check_exchange(self) -> None:
        """Refuse what the exchange on Flower does not do."""
        if self.buffers == "recalibrate":
            raise ValueError(
                "buffers='recalibrate' needs a second pass over the clients' data in every round, which the exchange "
                "on Flower does not make; use buffers='average'"
            )

    def training(self, model: nn.Module, algorithm: Algorithm, clients: Clients) -> Training:
        """How every client trains, for a private copy of the module."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        check_options(model=model, algorithm=algorithm, **options)
        self.check_exchange()
        where = choose_device(self.device)
        private, compute = private_copy(model, where, self.dtype)
        return Training(
            model=private,
            layout=Layout.of(private),
            clients=clients.to(where),
            algorithm=algorithm,
            loss=self.loss,
            local=self.local,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            weight_decay=self.weight_decay,
            decoupled_weight_decay=self.decoupled_weight_decay,
            clip_norm=self.clip_norm,
            seed=self.seed,
            device=where,
            compute=compute,
        )

    def rules(self, algorithm: Algorithm) -> Rules:
        """How the server treats the replies."""
        reductions = as_reductions(self.reduce, algorithm.slots)
        return Rules(self.weighting, self.buffers, self.min_clients, reductions, self.max_norm_ratio)

    def rate(self, algorithm: Algorithm, round: int) -> float:
        """The clients' rate in a round (from 1)."""
        return algorithm.lr * self.lr_decay ** ((round - 1) // self.lr_decay_every)
