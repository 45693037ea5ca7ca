"""How fast clients compute, on a virtual clock: so that runs can be compared by the time that they would take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlalr.common.option_types import NotNegative, check_type
from fedlalr.common.reading import at_home
from fedlalr.data.random import SPEEDS, key

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
    check_type("speeds", speeds, NotNegative, ", a list with a number for every client, or the name of a file")


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
