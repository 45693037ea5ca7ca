"""Named slots: the vocabulary in which every algorithm is written.

A *slot* is a named, model-shaped quantity (`x`, `m`, `v_hat`). A `Slots` value holds some of them: the server's state,
its broadcast, a client's working state, a client's upload. Each slot is one tensor: a flat vector `[P]` for one client
or the server, a stack `[C, P]` for a cohort. Algorithms are element-wise, so the same code serves both.

A `SlotTable` declares which slots travel, in which direction, how the server reduces them, and which a client keeps.
It determines the communication cost.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Reduction = Literal["mean", "max"]


class Slots(Mapping[str, Tensor]):
    """An immutable mapping from slot name to tensor that also reads as attributes.

    >>> import torch
    >>> state = Slots(x=torch.zeros(2), m=torch.ones(2))
    >>> state.m
    tensor([1., 1.])
    >>> list(state.replace(m=state.x).only("m"))
    ['m']
    """

    __slots__ = ("_tensors",)
    _tensors: dict[str, Tensor]

    def __init__(self, **tensors: Tensor) -> None:
        object.__setattr__(self, "_tensors", tensors)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._tensors[name]
        except KeyError:
            raise AttributeError(f"there is no slot {name!r} here, only {', '.join(self._tensors) or 'none'}") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("slots are immutable; use replace() to get a new value")

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()  # Mapping's own version is several times slower

    def __repr__(self) -> str:
        return f"Slots({', '.join(f'{name}={tuple(tensor.shape)}' for name, tensor in self._tensors.items())})"

    def __reduce__(self) -> tuple[Callable[[dict[str, Tensor]], Slots], tuple[dict[str, Tensor]]]:
        return _from_dict, (self._tensors,)

    def replace(self, **changes: Tensor) -> Slots:
        """A copy with some slots changed or added."""
        return Slots(**{**self._tensors, **changes})

    def only(self, *names: str) -> Slots:
        """Only the named slots, in that order."""
        return Slots(**{name: self._tensors[name] for name in names})

    def map(self, function: Callable[[Tensor], Tensor]) -> Slots:
        """Apply a function to every slot."""
        return Slots(**{name: function(tensor) for name, tensor in self._tensors.items()})


def _from_dict(tensors: dict[str, Tensor]) -> Slots:
    return Slots(**tensors)


@dataclass(frozen=True)
class SlotTable:
    """Which slots travel and how: the communication contract of an algorithm.

    `down` is broadcast by the server. `up` is sent by every client, with the reduction that the server applies over the
    cohort; a slot that is also in `down` is reduced as *change from the broadcast*, so that a coordinate nobody touched
    stays exactly as it was. `kept` stays on the client from one of its rounds to the next and starts at zero. `counts`
    names kept slots that are one number `[1]` instead of one per coordinate, such as a number of steps. `follows` is a
    kept slot and the uploaded slot by which it changes, such as `("c_i", "delta_c")`: if the server clips that change,
    or a codec rounds it, the kept slot changes by what the server takes, so that both sides still agree (with privacy
    or another reduction than the mean they do not). `grows` names slots that can only grow from the broadcast value, so
    that a reply below it is rejected. `relative` names slots that the method divides by, or that it divides: their
    small numbers must not be rounded to zero. Slots that grow or start above zero need not be listed.

    `blocks` names slots with one number for each parameter tensor, the same in all its coordinates; only that number is
    sent. A client's upload of such a slot is replaced by its mean over each tensor.

    `gradients` requests more than the gradient at x: before every step the engine writes into a client's slot the
    gradient of the same mini-batch at another of its slots, e.g. `{"g_start": "x_start"}`.

    `shapes` requests the shapes of the parameters in `context.shapes`, for methods that are not element-wise.
    """

    down: tuple[str, ...]
    up: Mapping[str, Reduction]
    kept: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    follows: tuple[str, str] | None = None
    grows: tuple[str, ...] = field(default=())
    relative: tuple[str, ...] = ()
    gradients: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    shapes: bool = False

    def __post_init__(self) -> None:
        for what in ("down", "kept", "counts", "grows", "blocks"):
            names = getattr(self, what)
            if isinstance(names, str) or len(set(names)) < len(names):
                raise ValueError(f"{what} must name slots, each once, such as ('x', 'm'), not {names!r}")
        if "x" not in self.down:
            raise ValueError("a slot table must broadcast 'x', the model's parameters")
        for name, how in self.up.items():
            if how not in ("mean", "max"):
                raise ValueError(f"slot {name!r} has reduction {how!r}; allowed are 'mean' and 'max'")
        for name in self.counts:
            if name not in self.kept:
                raise ValueError(f"slot {name!r} is listed in counts but is not in kept")
        whole = [name for name in self.kept if name not in self.counts]
        pairs = [(kept, sent) for kept in whole for sent in self.up if sent not in self.down]
        if self.follows is not None and self.follows not in pairs:
            raise ValueError(
                f"follows must name a slot in kept that is not in counts, and one that is only in up, such as "
                f"('c_i', 'delta_c'), not {self.follows!r}"
            )
        for name in self.grows:
            if name not in self.up or name not in self.down:
                raise ValueError(f"slot {name!r} is listed in grows but is not in both down and up")
        for name in self.blocks:
            if name == "x" or name not in (*self.up, *self.down):
                raise ValueError(
                    f"slot {name!r} is listed in blocks, which must name slots in down or up other than 'x'"
                )

    def nothing_kept(self, x: Tensor) -> Slots:
        """What a client with parameters x keeps before its first round, or what each of a stack does."""
        return Slots(**{name: torch.zeros_like(x[..., :1] if name in self.counts else x) for name in self.kept})


@dataclass(frozen=True)
class Context:
    """What an algorithm may know besides tensors.

    On a client `steps` is its own number of local steps K (a tensor `[C, 1]` if clients of a stack differ) and
    `step` counts them from 1. On the server `steps` is the mean of K over the accepted replies, weighted like the
    reduction.
    """

    round: int
    """t, from 1."""
    lr: float | Tensor
    """The clients' learning rate in this round, after the schedule."""
    steps: float | Tensor
    step: int | Tensor = 0
    cohort: int = 1
    """Number of clients whose replies count in this round."""
    population: int = 1
    """Number of clients in total."""
    shapes: tuple[torch.Size, ...] = ()
    """The parameters' shapes, in the order of the flat vector, on clients, if the slot table requests them."""


@runtime_checkable
class Algorithm(Protocol):
    """A federated method: a slot table and five small functions. CONTRIBUTING.md shows how to add one."""

    @property
    def lr(self) -> float:
        """The clients' learning rate, before any schedule."""

    @property
    def slots(self) -> SlotTable:
        """Which slots travel, how they are reduced, and which are kept."""

    def init(self, params: Tensor) -> Slots:
        """The server's initial state, from the model's parameters."""

    def start(self, broadcast: Slots, kept: Slots) -> Slots:
        """A client's state at the start of a round."""

    def step(self, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
        """One local step. Element-wise, so that it serves one client and a stack of clients."""

    def finish(self, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
        """What the client sends (the table's `up`) and what it keeps (the table's `kept`)."""

    def update(self, server: Slots, reduced: Slots, context: Context) -> Slots:
        """The server's new state from the reduced uploads."""
