"""A federation in plain NumPy float64: a small network with its gradient by hand, and the rounds around a method.

Nothing here imports the library. A client's work of a round is a list of *oracles*, one per local step: each maps the
parameters to its mini-batch's gradient, clipped, weight decay added. A method is one function
`(server, kept, round) → server` over dictionaries of vectors; `simulate` runs the rounds and returns the server's and
the clients' vectors after each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
State = dict[str, Vector]
Kept = dict[int, State]
Oracle = Callable[[Vector], Vector]
Batch = tuple[NDArray[np.float64], NDArray[np.int64]]


@dataclass(frozen=True)
class Network:
    """inputs → W1, b1 → tanh → W2, b2 → softmax, parameters flattened as (W1, b1, W2, b2), each matrix [out, in]."""

    features: int
    hidden: int
    classes: int

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [(self.hidden, self.features), (self.hidden,), (self.classes, self.hidden), (self.classes,)]

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes)

    def unflatten(self, x: Vector) -> list[Vector]:
        parts, start = [], 0
        for shape in self.shapes:
            stop = start + int(np.prod(shape))
            parts.append(x[start:stop].reshape(shape))
            start = stop
        return parts

    def probabilities(self, x: Vector, inputs: Vector) -> tuple[Vector, Vector]:
        """Hidden activations and class probabilities."""
        w1, b1, w2, b2 = self.unflatten(x)
        hidden = np.tanh(inputs @ w1.T + b1)
        logits = hidden @ w2.T + b2
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)

    def loss(self, x: Vector, batch: Batch) -> float:
        """Mean cross-entropy over the batch."""
        inputs, targets = batch
        _, p = self.probabilities(x, inputs)
        return float(-np.log(p[np.arange(len(targets)), targets]).mean())

    def gradient(self, x: Vector, batch: Batch) -> Vector:
        """The gradient of `loss`, by hand: softmax minus one-hot, carried back through the tanh."""
        inputs, targets = batch
        _, _, w2, _ = self.unflatten(x)
        hidden, p = self.probabilities(x, inputs)
        at_logits = p.copy()
        at_logits[np.arange(len(targets)), targets] -= 1.0
        at_logits /= len(targets)
        at_hidden = (at_logits @ w2) * (1.0 - hidden**2)
        parts = [at_hidden.T @ inputs, at_hidden.sum(axis=0), at_logits.T @ hidden, at_logits.sum(axis=0)]
        return np.concatenate([part.ravel() for part in parts])


@dataclass(frozen=True)
class Client:
    """One client's part of a round: its id, its share of the mean, and the gradient oracle of each local step."""

    id: int
    share: float
    oracles: Sequence[Oracle]

    @property
    def steps(self) -> int:
        return len(self.oracles)


@dataclass(frozen=True)
class Round:
    number: int
    lr: float
    clients: Sequence[Client]
    population: int

    def mean(self, values: Sequence[Vector] | Sequence[float]) -> Vector:
        """Σ share_i · value_i: over this round's clients, shares adding to one."""
        return sum((client.share * np.asarray(value) for client, value in zip(self.clients, values, strict=True)), 0.0)


Method = Callable[[State, Kept, Round], State]


@dataclass(frozen=True)
class Federation:
    """What surrounds the method. `plan[t - 1][i]` lists client i's mini-batches of round t; its keys are the cohort."""

    network: Network
    plan: Sequence[dict[int, list[Batch]]]
    sizes: Sequence[int]
    lr: float
    lr_decay: float = 1.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    weighting: str = "uniform"

    def oracle(self, batch: Batch) -> Oracle:
        def gradient(x: Vector) -> Vector:
            g = self.network.gradient(x, batch)
            norm = np.sqrt((g**2).sum())
            if self.clip_norm is not None and norm > self.clip_norm:
                g = g * (self.clip_norm / norm)
            return g + self.weight_decay * x

        return gradient

    def round(self, number: int) -> Round:
        work = self.plan[number - 1]
        counts = {i: 1.0 if self.weighting == "uniform" else float(self.sizes[i]) for i in sorted(work)}
        total = sum(counts.values())
        clients = [Client(i, counts[i] / total, [self.oracle(batch) for batch in work[i]]) for i in counts]
        return Round(number, self.lr * self.lr_decay ** (number - 1), clients, len(self.sizes))


def simulate(
    federation: Federation, method: Method, server: State, kept: Kept | None = None
) -> list[tuple[State, Kept]]:
    """Run every round of the plan; the server's state and what the clients keep, after each."""
    kept = {} if kept is None else {i: dict(state) for i, state in kept.items()}
    history = []
    for number in range(1, len(federation.plan) + 1):
        server = method(server, kept, federation.round(number))
        history.append((dict(server), {i: dict(state) for i, state in kept.items()}))
    return history
