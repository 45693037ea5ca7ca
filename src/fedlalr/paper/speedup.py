"""The linear speed-up, measured: does the mean of ‖∇f(x̄)‖² over all local steps fall like 1/√(NKT)?

On a synthetic problem with known constants, N = 1, 2, 4, … 64 clients run FedLALR at the step size of the corollary.
The left side of the theorems is observed at the clients' average iterate before every local step, and the slope of its
logarithm against that of N·K·T is fitted; the paper claims −1/2.

The regime matters. 1/√(NKT) is above N/(KT) only for KT > N³, so a point counts as in the regime where KT ≥ 8 N³ and
the cap 3ε/(20L) on the step size does not bind. ε = ½ is large, which is legitimate since L = 1 is known; it keeps the
cap loose for KT ≥ 178 N, and lies below the gradients' size, so that second moments adapt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlalr.algorithms import Context, FedAvg, FedLALR, Slots
from fedlalr.paper.speedup_results import CONTROLS, Speedup, SpeedupPoint
from fedlalr.paper.synthetic import Synthetic
from fedlalr.theory import adaptive_step_size, log_intervals
from fedlalr.training.torch_state import number_of_threads

EPS = 0.5
BETAS = (0.9, 0.995)
"""The paper's for CIFAR-10."""


@dataclass(frozen=True)
class Variant:
    """A form of the method, or a control, and how its local steps grow: K in every round, or 3 + ⌊log₄ t⌋."""

    name: str
    momentum: Literal["average", "restart"] = "average"
    second_moment: Literal["mean", "max"] = "mean"
    interval: Literal["fixed", "adaptive"] = "fixed"

    @property
    def algorithm(self) -> FedLALR | FedAvg:
        """The method that clients run; local SGD is FedAvg with all clients."""
        if self.name in CONTROLS:
            return FedAvg()
        return FedLALR(betas=BETAS, eps=EPS, momentum=self.momentum, second_moment=self.second_moment)

    def intervals(self, steps: int, K: int) -> NDArray[np.int64]:
        """K_t of every round, for as many rounds as `steps` local steps need."""
        if self.interval == "fixed":
            return np.full(-(-steps // K), K, dtype=np.int64)
        growing = log_intervals(steps // 3 + 1, start=3, base=4.0)
        return growing[: int(np.searchsorted(growing.cumsum(), steps)) + 1]


VARIANTS = (
    Variant("Algorithm 1"),
    Variant("restart", momentum="restart"),
    Variant("max", second_moment="max"),
    Variant("adaptive interval", interval="adaptive"),
    *map(Variant, CONTROLS),
)


@dataclass(frozen=True)
class Scale:
    """The size of the experiment: local steps KT of each run, numbers of clients, and repeats with their own noise."""

    steps: tuple[int, ...]
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    K: int = 8
    repeats: int = 5

    @property
    def work(self) -> int:
        """Local steps of all variants and runs together, for the progress bar."""
        return sum(int(variant.intervals(steps, self.K).sum()) for variant in VARIANTS for steps in self.steps)


SCALES = {"smoke": Scale(steps=(2**11, 2**13, 2**15)), "paper": Scale(steps=(2**13, 2**15, 2**17, 2**19, 2**21))}
"""In the regime up to N = 16 on the smoke scale, up to N = 64 on the paper's."""


def measure(
    scale: Scale,
    *,
    folder: Path | None = None,
    variants: Sequence[Variant] = VARIANTS,
    seed: int = 0,
    advance: Callable[[int], None] = lambda steps: None,
) -> Speedup:
    """Run every variant at every length. `advance` is called with the local steps as they are done.

    With a folder, each finished run is written to its `speedup.csv` at once, and runs found there are not repeated.
    """
    known = Speedup.read(folder) if folder else Speedup(())
    points: list[SpeedupPoint] = []
    for variant in variants:
        for steps in scale.steps:
            intervals = variant.intervals(steps, scale.K)
            found = _found(known, variant, scale, intervals, seed)
            points += found or _run(variant, scale, intervals, seed, advance)
            if found:
                advance(int(intervals.sum()))
            elif folder:
                Speedup(tuple(points)).write(folder)
    return Speedup(tuple(points))


def _found(
    known: Speedup, variant: Variant, scale: Scale, intervals: NDArray[np.int64], seed: int
) -> tuple[SpeedupPoint, ...]:
    """The points of exactly this run among the known ones, or nothing."""
    same = tuple(
        point
        for point in known.of(variant.name)
        if (point.steps, point.rounds, point.seed) == (int(intervals.sum()), len(intervals), seed)
        and len(point.values) == scale.repeats
    )
    return same if tuple(point.N for point in same) == scale.clients else ()


def _run(
    variant: Variant, scale: Scale, intervals: NDArray[np.int64], seed: int, advance: Callable[[int], None]
) -> tuple[SpeedupPoint, ...]:
    """One run of all numbers of clients side by side, with the same noise for every variant."""
    sizes = [adaptive_step_size(N=N, intervals=intervals, eps=EPS, L=1.0) for N in scale.clients]
    generator = np.random.default_rng([seed, int(intervals.sum())])
    rates = [size.alpha for size in sizes]
    with number_of_threads(1):  # tensors of a few thousand numbers take several times as long on two
        values = mean_squared_gradients(
            variant.algorithm, scale.clients, rates, intervals, scale.repeats, generator, advance
        )
    return tuple(
        SpeedupPoint(
            variant=variant.name,
            N=N,
            rounds=len(intervals),
            last_interval=int(intervals[-1]),
            steps=int(intervals.sum()),
            alpha=size.alpha,
            cap_binds=size.cap_binds,
            seed=seed,
            values=tuple(values[:, index].tolist()),
        )
        for index, (N, size) in enumerate(zip(scale.clients, sizes, strict=True))
    )


def mean_squared_gradients(
    algorithm: FedLALR | FedAvg,
    clients: Sequence[int],
    rates: Sequence[float],
    intervals: NDArray[np.int64],
    repeats: int,
    generator: np.random.Generator,
    advance: Callable[[int], None] = lambda steps: None,
    problem: Synthetic | None = None,
) -> Tensor:
    """The mean of ‖∇f(x̄)‖² over all local steps, `[repeats, len(clients)]`: one federation per number of clients."""
    problem = problem or Synthetic()
    federations = _Federations(clients)
    shifts = torch.cat([problem.shifts(N, repeats, generator) for N in clients], dim=1)
    lr = torch.tensor(rates, dtype=torch.float64)[federations.owner, None]
    server = algorithm.init(torch.full((repeats, len(clients), problem.d), problem.start, dtype=torch.float64))
    total = torch.zeros(repeats, len(clients), dtype=torch.float64)
    for t, K in enumerate(intervals.tolist(), start=1):
        context = Context(round=t, lr=lr, steps=K)
        broadcast = federations.broadcast(server)
        client = algorithm.start(broadcast, Slots())
        disturbance = problem.noises((K, *shifts.shape), generator).add_(shifts)
        averages = []
        for k in range(K):
            averages.append(federations.mean(client.x))
            client = algorithm.step(client, problem.gradient(client.x) + disturbance[k], broadcast, context)
        total += (problem.gradient(torch.stack(averages)) ** 2).sum(dim=(0, -1))
        upload, _ = algorithm.finish(client, broadcast, context)
        server = algorithm.update(server, federations.reduce(algorithm, upload, broadcast, server), context)
        advance(K)
    return total / int(intervals.sum())


class _Federations:
    """Federations of F sizes side by side: their clients in one stack `[…, ΣN, d]`, their servers in `[…, F, d]`."""

    def __init__(self, clients: Sequence[int]) -> None:
        sizes = torch.tensor(clients)
        self.spans = list(pairwise([0, *accumulate(clients)]))
        self.owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        self.share = (self.owner == torch.arange(len(sizes))[:, None]) / sizes[:, None].double()

    def broadcast(self, server: Slots) -> Slots:
        """The broadcast that every client receives from its server."""
        return server.map(lambda slot: slot[..., self.owner, :])

    def mean(self, stack: Tensor) -> Tensor:
        return self.share @ stack

    def maximum(self, stack: Tensor) -> Tensor:
        return torch.stack([stack[..., begin:end, :].amax(-2) for begin, end in self.spans], dim=-2)

    def reduce(self, algorithm: FedLALR | FedAvg, upload: Slots, broadcast: Slots, server: Slots) -> Slots:
        """Reduce every uploaded slot as the algorithm's table says, with means of changes from the broadcast."""
        return Slots(
            **{
                name: self.maximum(upload[name])
                if how == "max"
                else server[name] + self.mean(upload[name] - broadcast[name])
                for name, how in algorithm.slots.up.items()
            }
        )
