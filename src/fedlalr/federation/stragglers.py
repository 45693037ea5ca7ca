"""Slow clients: how fast each computes, on a virtual clock, and rounds that do not wait for the slowest.

With the clock, runs can be compared by the time that they would take. There are two ways not to wait: over-selection,
and a deadline with partial work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedlalr.common.option_types import Checked, NotNegative, Positive, check_type
from fedlalr.common.reading import at_home
from fedlalr.data.random import SPEEDS, key

TOO_SLOW = "it finished no local step before the deadline"
LONGER = "raise the deadline of stragglers"


def remedy(reason: str, debug: str) -> str:
    """What to do about a rejected reply; `debug` is the option that shows the client's data."""
    if reason == TOO_SLOW:
        return LONGER
    return f"run with {debug} to see what is wrong with it"


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


Speeds = float | str | Path | Sequence[float]
"""The spread of a log-normal distribution, a number for every client, or a text file with one per line."""


def client_speeds(speeds: Speeds | None, population: int, seed: int) -> Tensor:
    """Local steps per virtual second of every client, float64 `[N]`.

    >>> client_speeds([1, 2.5], 2, seed=0).tolist(), client_speeds(None, 2, seed=0).tolist()
    ([1.0, 2.5], [1.0, 1.0])
    """
    if speeds is None:
        return torch.ones(population, dtype=torch.float64, device="cpu")
    if isinstance(speeds, int | float):
        random = np.random.Generator(np.random.Philox(key=key(seed, SPEEDS) % (1 << 64)))
        return torch.from_numpy(np.exp(speeds * random.standard_normal(population)))
    where = f"the file {speeds}" if isinstance(speeds, str | Path) else "speeds"
    given = _in_file(speeds) if isinstance(speeds, str | Path) else list(speeds)
    if len(given) != population:
        raise ValueError(f"{where} has {len(given)} numbers, but there are {population} clients; give one for each")
    found = torch.tensor([float(each) for each in given], dtype=torch.float64, device="cpu")
    wrong = torch.nonzero(~(found.isfinite() & (found > 0)))
    if len(wrong):
        worst = int(wrong[0])
        raise ValueError(
            f"{where} gives client {worst} the speed {given[worst]}; a speed is a finite number above 0, in local "
            f"steps per virtual second"
        )
    return found


def check_speeds(speeds: object) -> None:
    """Reject anything but the forms of `Speeds`; the numbers are checked when the clients are known."""
    if speeds is None or isinstance(speeds, str | Path):
        return
    if isinstance(speeds, Sequence):
        for each in speeds:
            if isinstance(each, bool) or not isinstance(each, int | float):
                raise TypeError(f"speeds contains {each!r}; give a number for every client")
        return
    also = ", a list with a number for every client (array.tolist()), or the name of a file"
    check_type("speeds", speeds, NotNegative, also)


def _in_file(path: str | Path) -> list[float]:
    """The numbers in a text file, one per line."""
    lines = at_home(str(path)).read_text(encoding="utf-8").split("\n")
    numbers = []
    for place, line in enumerate(lines, 1):
        if line.strip():
            try:
                numbers.append(float(line))
            except ValueError:
                raise ValueError(f"line {place} of {path} is {line.strip()!r}, not a number") from None
    return numbers
