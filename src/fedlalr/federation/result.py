"""What a run returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fedlalr.federation.observers import RunInfo
from fedlalr.federation.record import Record
from fedlalr.federation.round import ServerState
from fedlalr.training import Training
from fedlalr.training.torch_state import copied, set_buffers

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

    @property
    def bytes_up(self) -> int:
        """Bytes that the clients sent over the whole run."""
        return sum(record.bytes_up for record in self.history)

    @property
    def bytes_down(self) -> int:
        """Bytes that the server sent over the whole run."""
        return sum(record.bytes_down for record in self.history)

    def __repr__(self) -> str:
        """One line for a notebook."""
        if not self.history:
            return f"Result({self.info.algorithm}, no rounds)"
        last = self.history[-1]
        accuracy = "" if last.accuracy is None else f"accuracy {last.accuracy:.1%}, "
        metrics = "".join(f"{name} {value:.4g}, " for name, value in last.metrics.items())
        return (
            f"Result({self.info.algorithm}, {last.round} {'round' if last.round == 1 else 'rounds'}: "
            f"{accuracy}loss {last.loss:.4g}, {metrics}"
            f"{self.bytes_up / 1e6:.3g} MB up, {self.bytes_down / 1e6:.3g} MB down)"
        )


def named_state(state: ServerState, training: Training) -> State:
    """The server's slots under the names of the module's parameters."""
    return {
        slot: {name: view.clone() for name, view in training.layout.views(flat).items()}
        for slot, flat in state.slots.items()
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
