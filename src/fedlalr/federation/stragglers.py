"""Rounds that do not wait for the slowest clients: over-selection, and a deadline with partial work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedlalr.common.option_types import Checked, NotNegative, Positive

TOO_SLOW = "it finished no local step before the deadline"


@dataclass(frozen=True)
class Stragglers(Checked):
    """oversample: sample this share of clients in addition, and take the first `clients_per_round` replies.
    deadline: virtual seconds after which a client sends what it has, with its own number of local steps. On Flower:
        seconds of local training on its node, which sends what it has after the step that ends then or later.
    """

    oversample: NotNegative = 0.0
    deadline: Positive | None = None

    def sampled(self, count: int) -> int:
        """The clients that are sampled so that `count` replies can be taken.

        >>> Stragglers(oversample=0.2).sampled(50)
        60
        """
        return count + math.ceil(round(count * self.oversample, 9))  # 50 * 0.2 is a little more than 10

    def most_steps(self, speeds: Tensor) -> Tensor | None:
        """The local steps that each client finishes before the deadline, `[N]`; None without one."""
        return None if self.deadline is None else (self.deadline * speeds).floor().clamp(max=2**31).long()


class Arrivals(NamedTuple):
    """The replies of a round that are taken."""

    clients: Tensor
    """Ascending."""
    seconds: float
    """Virtual time from the start of the round until it closes."""
    too_slow: tuple[int, ...]
    """Clients that had nothing to send at the deadline."""


def first_arrivals(cohort: Tensor, count: int, steps: Tensor, speeds: Tensor, stragglers: Stragglers) -> Arrivals:
    """The first `count` replies of a cohort. `steps` is K without a deadline and `speeds` are the clients', `[C]`.

    A client that the deadline stops replies at the deadline; at one instant the lower ids come first.
    """
    seconds = steps.double() / speeds
    most = stragglers.most_steps(speeds)
    slow = torch.zeros_like(cohort, dtype=torch.bool) if most is None else most < 1
    if stragglers.deadline is not None:
        seconds = seconds.clamp(max=stragglers.deadline)
    rows = seconds.argsort(stable=True)
    taken = rows[~slow[rows]][:count]
    # a round that too few clients answer lasts until the deadline
    enough = len(taken) == count or stragglers.deadline is None
    closes = max(seconds[taken].tolist(), default=0.0) if enough else float(stragglers.deadline or 0.0)
    return Arrivals(cohort[taken].sort().values, closes, tuple(cohort[slow].tolist()))
