"""Evaluates every client's model on samples of its own, and summarises the scores over the clients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from fedlalr.algorithms.slots import Slots
from fedlalr.data.population import Clients
from fedlalr.data.random import MODULES, key
from fedlalr.federation.evaluation import evaluate
from fedlalr.federation.record import Distribution
from fedlalr.federation.round import ServerState
from fedlalr.training.interfaces import Buffers, Training
from fedlalr.training.personal import first_kept, load_client, shared_buffers, shared_slots
from fedlalr.training.ranks import ALONE, Ranks
from fedlalr.training.torch_state import forked_generators, seed_generators

WORST = 0.1
"""The share of clients whose mean is reported separately, rounded up to whole clients."""


class Score(NamedTuple):
    """The quality of one client's model on its own samples."""

    loss: float
    accuracy: float | None
    """None if targets are not classes."""


def evaluate_clients(training: Training, state: ServerState, tests: Clients, ranks: Ranks = ALONE) -> dict[int, Score]:
    """The score of every client that has test samples; each rank evaluates its share of the clients."""
    first = first_kept(training, state.slots, state.buffers)
    sent = shared_slots(training, state.slots.only("x")), shared_buffers(training, state.buffers)
    clients = torch.nonzero(tests.sizes).flatten()[ranks.rank :: ranks.count].tolist()
    mine = {
        client: evaluate_client(training, *sent, state.kept.get(client, first), tests, client, state.round)
        for client in clients
    }
    every = {client: score for part in ranks.gather_values(mine) for client, score in part.items()}
    return dict(sorted(every.items()))


def evaluate_client(
    training: Training, sent: Slots, buffers: Buffers, kept: Slots, tests: Clients, client: int, round: int
) -> Score:
    """One client's score, from the x and buffers that the server sends and what the client keeps."""
    size = int(tests.sizes[client])
    if not size:
        raise ValueError(f"client {client} has no test samples")
    load_client(training, sent.x, buffers, kept)
    with forked_generators(training.device):
        seed_generators(training.device, key(training.seed, MODULES, round, client))  # some modules draw in eval mode
        try:
            samples = tests.batch(client, torch.arange(size, device="cpu"))
            found = evaluate(training.model, samples, training.loss, compute=training.compute)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"client {client} cannot be evaluated on its test samples: {reason}") from error
    return Score(found.loss, found.accuracy)


def distributions(scores: Mapping[int, Score]) -> dict[str, Distribution]:
    """Mean, spread and worst clients of the loss and, if all clients have one, of the accuracy.

    >>> scores = {client: Score(1.0, accuracy) for client, accuracy in enumerate([0.5, 0.75, 1.0])}
    >>> distributions(scores)["accuracy"].mean, distributions(scores)["accuracy"].worst
    (0.75, 0.5)
    """
    losses = [score.loss for score in scores.values()]
    accuracies = [score.accuracy for score in scores.values() if score.accuracy is not None]
    found = {"loss": _distribution(losses, highest_is_worst=True)} if losses else {}
    if accuracies and len(accuracies) == len(losses):
        found["accuracy"] = _distribution(accuracies, highest_is_worst=False)
    return found


def _distribution(values: list[float], *, highest_is_worst: bool) -> Distribution:
    each = torch.tensor(values, dtype=torch.float64)
    worst = each.sort(descending=highest_is_worst).values[: math.ceil(WORST * len(values))]  # NaN counts as highest
    return Distribution(float(each.mean()), float(each.std(correction=0)), float(worst.mean()), len(values))
