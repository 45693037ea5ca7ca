"""What a run returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedlalr.common.colours import COLOURS
from fedlalr.federation.observers import RunInfo
from fedlalr.federation.record import Record, over_clients, spent
from fedlalr.federation.round import ServerState
from fedlalr.training import Training
from fedlalr.training.personal import BUFFER, SLOT, named
from fedlalr.training.torch_state import copied, set_buffers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Result:
    """The outcome of a run. Compared by identity, as modules and tensors are."""

    history: list[Record]
    """One record per round."""
    state: State
    """The server's slots by name, each a dict from parameter name to tensor."""
    model: nn.Module
    """The trained module, a copy of the one passed in."""
    info: RunInfo
    personal: Mapping[int, Mapping[str, Tensor]] | None = field(default_factory=dict)
    """The personal parameters and local buffers of each client that took part, by name; None if they are on the
    clients' own machines."""

    def client_model(self, client: int) -> nn.Module:
        """A client's model: the server's, with its own personal parameters and local buffers if it took part."""
        if not 0 <= client < self.info.population:
            raise ValueError(f"there is no client {client}; the clients are numbered 0 to {self.info.population - 1}")
        if self.personal is None:
            raise RuntimeError("the clients' models are on their own machines; the server has only what they share")
        model = copied(self.model)
        own = self.personal.get(client, {})
        with torch.no_grad():
            for name, value in (*model.named_parameters(), *model.named_buffers()):
                if name in own:
                    value.copy_(own[name])
        return model

    @property
    def bytes_up(self) -> int:
        """Bytes that the clients sent over the whole run."""
        return sum(record.bytes_up for record in self.history)

    @property
    def bytes_down(self) -> int:
        """Bytes that the server sent over the whole run."""
        return sum(record.bytes_down for record in self.history)

    def to_frame(self) -> DataFrame:
        """The history as a pandas DataFrame, one row per round. It needs pandas.

        A metric is under its own name, or under `metrics/` and its name if a record has a number of that name.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("to_frame needs pandas, which is not installed: pip install pandas") from error
        rounds = pd.Index([record.round for record in self.history], name="round")
        frame = pd.DataFrame([record.numbers() for record in self.history], rounds)
        frame = frame.drop(columns="round", errors="ignore")
        short = {name: name.removeprefix("metrics/") for name in frame.columns}
        return frame.rename(columns={name: own for name, own in short.items() if own not in frame.columns})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the loss, and the accuracy if there is one, by round. Returns the axes of the loss.

        ax: Axes to draw in; None: those of a new figure.
        """
        import matplotlib.pyplot as plt
        from matplotlib.ticker import MaxNLocator

        axes = plt.subplots(layout="constrained")[1] if ax is None else ax
        _draw(axes, self.history, "loss", COLOURS[1])
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if any(record.accuracy is not None for record in self.history):
            _draw(axes.twinx(), self.history, "accuracy", COLOURS[0])
        return axes

    def save(self, path: str | Path) -> None:
        """Write history, state, model and `info` to one file, without pickle; `fl.load(path, model)` reads it."""
        from fedlalr.federation.storage.saved_result import save_result  # here, as it imports this module

        save_result(self, path)

    def __repr__(self) -> str:
        """One line for a notebook."""
        if not self.history:
            return f"Result({self.info.algorithm}, no rounds)"
        last = self.history[-1]
        accuracy = "" if last.accuracy is None else f"accuracy {last.accuracy:.1%}, "
        metrics = "".join(f"{name} {value:.4g}, " for name, value in last.metrics.items())
        metrics += over_clients(last.per_client) + spent(last)
        return (
            f"Result({self.info.algorithm}, {last.round} {'round' if last.round == 1 else 'rounds'}: "
            f"{accuracy}loss {last.loss:.4g}, {metrics}"
            f"{self.bytes_up / 1e6:.3g} MB up, {self.bytes_down / 1e6:.3g} MB down)"
        )


def _draw(axes: Axes, history: list[Record], name: str, colour: str) -> None:
    """A line over the rounds that have a value, and its name in its colour at its own scale."""
    points = [(record.round, value) for record in history if (value := getattr(record, name)) is not None]
    axes.plot(*zip(*points, strict=True), color=colour, label=name)
    axes.set_ylabel(name, color=colour)
    axes.tick_params(axis="y", labelcolor=colour)


def named_state(state: ServerState, training: Training) -> State:
    """The server's slots under the names of the module's parameters."""
    return {
        slot: {name: view.clone() for name, view in training.layout.views(flat).items()}
        for slot, flat in state.slots.items()
    }


def personal_states(state: ServerState, training: Training, *, here: bool) -> dict[int, dict[str, Tensor]] | None:
    """The personal parameters and local buffers of each client that took part; None if they are not held `here`."""
    if not training.is_personal or not here:
        return None if training.is_personal else {}
    layout = training.division.personal
    return {
        client: {**(layout.views(kept[f"{SLOT}x"]) if training.personal else {}), **named(kept, BUFFER)}
        for client, kept in state.kept.items()
    }


def trained_model(model: nn.Module, state: ServerState, training: Training) -> nn.Module:
    """A copy of the caller's module with the server's parameters and buffers, in the caller's training mode."""
    trained = copied(training.model)
    training.layout.load(trained, state.slots.x)
    set_buffers(trained, state.buffers)
    for mine, theirs in zip(trained.modules(), model.modules(), strict=True):
        mine.training = theirs.training
    for own, given in zip(trained.parameters(), model.parameters(), strict=True):
        own.requires_grad_(given.requires_grad)  # `trainable` froze some of them
    return trained
