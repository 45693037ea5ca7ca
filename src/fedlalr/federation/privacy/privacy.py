"""`Privacy`: what a user chooses, checked, and checked against a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Algorithm, Context, Slots
from fedlalr.common.named import check_names
from fedlalr.common.option_types import Checked, Positive, check_type
from fedlalr.federation.compression.compression import Compression
from fedlalr.federation.privacy.second_moment import DEGREES, is_derivable, second_moment_of
from fedlalr.federation.replies.reductions import BUFFERS
from fedlalr.training.intervals import Interval
from fedlalr.training.options import LocalOptions


@dataclass(frozen=True)
class Privacy(Checked):
    """Client-level differential privacy, around any method whose slots are averaged.

    In every round each client takes part with probability `clients_per_round` / clients. The changes of all slots that
    it sends are divided by their units, joined to one vector and clipped to the norm `clip`. The server adds Gaussian
    noise of standard deviation `noise_multiplier` · `clip` to the sum, and divides it by `clients_per_round`.

    clip: the norm to which a client's joint change is clipped.
    noise_multiplier: the noise, as a multiple of `clip`; or
    epsilon: the ε that the run may spend in its rounds, from which the noise multiplier is computed.
    delta: the δ at which ε is computed; None, only with a noise multiplier: ε is not computed.
    units: slot → fixed public scale of its changes; 1 for the first slot a method sends, required for all others.
        With `"buffers"`, floating-point buffers are sent like a slot. Otherwise they must be local.
    second_moment: "clients" send v̂ like other slots; with "server" they send x alone, and the server derives v̂ from
        the noised change of x, which costs no privacy.
    scaled: divide changes also by the root of the server's second moment, a public scale of each coordinate.
    """

    clip: Positive
    noise_multiplier: Positive | None = None
    epsilon: Positive | None = None
    delta: Positive | None = None
    units: Mapping[str, float] = field(default_factory=dict)
    second_moment: Literal["clients", "server"] = "clients"
    scaled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.noise_multiplier is None) == (self.epsilon is None):
            given = "neither is" if self.epsilon is None else "both are"
            raise ValueError(f"privacy needs either noise_multiplier or epsilon, but {given} given")
        if self.epsilon is not None and self.delta is None:
            raise ValueError("privacy with epsilon needs delta, such as delta=1e-5: less than 1 / (number of clients)")
        if self.delta is not None and self.delta >= 1:
            raise ValueError(f"delta must lie between 0 and 1, such as 1e-5, not {self.delta!r}")
        if not isinstance(self.units, Mapping):
            raise TypeError(f"units must be a dict from slot to scale, not {self.units!r}")
        for slot, unit in self.units.items():
            check_type(f"the unit of {slot}", unit, Positive)

    def check(self, algorithm: Algorithm, local: LocalOptions, buffers: Mapping[str, Tensor]) -> None:
        """Reject what does not fit a method, its local steps, or the buffers of its model."""
        method = type(algorithm).__name__
        sent = [slot for slot in algorithm.slots.up if slot not in self.withheld]
        if self.second_moment == "server" and not is_derivable(algorithm):
            raise ValueError(
                f"privacy with second_moment='server' needs a method that broadcasts x and v_hat alone, such as "
                f"fl.FedLALR(momentum='restart'); {method} broadcasts {', '.join(algorithm.slots.down)}"
            )
        self._check_units(sent, method)
        floats = [name for name, buffer in buffers.items() if buffer.is_floating_point()]
        if floats and local.buffers == "average" and BUFFERS not in self.units:
            raise ValueError(
                f"privacy: the model has buffers, such as {floats[0]}, which would be sent without noise; use "
                f"buffers='local', give units a scale for 'buffers', or use a model without them (GroupNorm)"
            )
        if _uses_steps(algorithm) and public_steps(local.local, 1) is None:
            raise ValueError(
                f"privacy: {method} needs the number of local steps on the server, which depends on the clients' "
                f"private numbers of samples; use local=fl.Steps(K)"
            )
        if self.scaled:
            self._check_scaled(algorithm, sent)

    @property
    def withheld(self) -> tuple[str, ...]:
        """The slots that a method would send, but the server derives."""
        return ("v_hat",) if self.second_moment == "server" else ()

    def unit(self, slot: str) -> float:
        """The scale of a slot's changes."""
        return self.units.get(slot, 1.0)

    def _check_units(self, sent: Sequence[str], method: str) -> None:
        slots = [slot for slot in self.units if slot != BUFFERS]
        check_names("privacy: units names", slots, f"{method} sends", sent)
        for slot in sent[1:]:
            if slot not in self.units:
                raise ValueError(
                    f"privacy: {method} also sends {slot}, which is clipped together with {sent[0]}; give "
                    f"units a public scale of its changes, such as units={{{slot!r}: 1e-3}}"
                )

    def _check_scaled(self, algorithm: Algorithm, sent: Sequence[str]) -> None:
        method = type(algorithm).__name__
        unknown = [slot for slot in sent if slot not in DEGREES]
        if second_moment_of(algorithm.init(torch.ones(1, dtype=torch.float64))) is None or unknown:
            raise ValueError(
                f"privacy with scaled=True needs a method whose server has a second moment v or v_hat, and that sends "
                f"only {', '.join(DEGREES)}, such as fl.FedAdam() or fl.FedLALR(); not {method}"
            )
        if not any(DEGREES[slot] for slot in sent):
            raise ValueError(
                f"privacy: scaled=True changes nothing here: {method} sends only {', '.join(sent)}, which its "
                f"clients have already divided by the root of v̂; leave it out"
            )


@dataclass(frozen=True)
class Withholding(Compression):
    """A compression that never sends some slots: the server derives them."""

    withheld: tuple[str, ...] = ()

    def waiting(self, round: int) -> set[str]:
        return super().waiting(round) | set(self.withheld)


def public_steps(local: Interval, round: int) -> int | None:
    """The local steps of every client in a round; None if they depend on the clients' data."""
    few, many = local.steps(round, torch.tensor([1, 1000])).tolist()
    return int(few) if few == many else None


def _uses_steps(algorithm: Algorithm) -> bool:
    """Whether the server's update depends on the clients' number of local steps, found by trying two."""
    with torch.no_grad():
        server = algorithm.init(torch.ones(2, dtype=torch.float64))
        reduced = Slots(**dict.fromkeys(algorithm.slots.up, torch.full((2,), 0.5, dtype=torch.float64)))
        first, second = (
            algorithm.update(server, reduced, Context(round=1, lr=algorithm.lr, steps=steps)) for steps in (2.0, 3.0)
        )
    return any(not torch.equal(first[name], second[name]) for name in first)
