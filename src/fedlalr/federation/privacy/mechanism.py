"""The Gaussian mechanism: clip each client's joint change, sum, add noise, divide by the expected cohort.

    uᵢ = the changes of all slots of client i, each divided by its unit, joined      (0 if any number is not finite)
    S  = Σ min(1, C / ‖uᵢ‖) uᵢ                        one client more or less changes S by at most C, in norm
    mean change = (S + N(0, σ² C² I)) / n             in units again; n is public, the number of replies is not

All in float64. As in most implementations, the noise is made of floating-point numbers: it does not protect against
someone who sees all digits of the result and searches them for traces of rounding (Mironov, CCS 2012).
"""

from __future__ import annotations

import math
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.data.random import NOISE, bits, key
from fedlalr.federation.privacy.privacy import Privacy

Noise = Callable[[str, int, torch.device], Tensor]
"""(slot, count, device) → that many standard normal numbers, float64."""
Unit = float | Tensor
NUMBERS_AT_A_TIME = 1 << 24
"""Numbers of the replies that are converted to float64 at once."""


class BudgetSpent(RuntimeError):
    """Another round would spend more privacy than the run was given."""


@dataclass(frozen=True)
class Mechanism:
    """A `Privacy` with the numbers of a run: its noise, and whom it samples."""

    privacy: Privacy
    noise_multiplier: float
    cohort: int
    """The expected number of clients in a round, by which sums are divided."""
    population: int
    rounds: int | None
    """The rounds that the noise multiplier was computed for; None if it was given."""

    @classmethod
    def of(cls, privacy: Privacy, cohort: int, population: int, rounds: int) -> Mechanism:
        """Compute the noise multiplier if an ε is given."""
        if privacy.noise_multiplier is not None:
            given = cls(privacy, privacy.noise_multiplier, cohort, population, None)
            given.spend(1)  # a missing extra or a δ that is too small is an error before the first round
            return given
        from fedlalr.federation.privacy.accounting import solve_noise_multiplier

        assert privacy.epsilon is not None  # `Privacy` checked it, and
        assert privacy.delta is not None
        noise = solve_noise_multiplier(privacy.epsilon, cohort / population, rounds, privacy.delta)
        return cls(privacy, noise, cohort, population, rounds)

    def spend(self, round: int) -> float | None:
        """ε after a round, None without a δ; raises `BudgetSpent` before a round that would exceed the budget."""
        self.check_rounds(round)
        if self.privacy.delta is None:
            return None
        from fedlalr.federation.privacy.accounting import epsilon  # here: it needs an extra

        return epsilon(self.noise_multiplier, self.cohort / self.population, round, self.privacy.delta)

    def check_rounds(self, rounds: int) -> None:
        """Reject more rounds than the noise was computed for."""
        if self.rounds is not None and rounds > self.rounds:
            raise BudgetSpent(
                f"round {self.rounds + 1} would spend more than epsilon={self.privacy.epsilon:g}: the noise was "
                f"computed for {self.rounds} rounds; set rounds={rounds} before the first round"
            )

    def deviation(self, unit: float = 1.0) -> float:
        """The standard deviation of the noise in the mean change of a slot."""
        return self.noise_multiplier * self.privacy.clip * unit / self.cohort

    def release(self, total: Mapping[str, Tensor], units: Mapping[str, Unit], noise: Noise) -> dict[str, Tensor]:
        """The noised mean change of every slot, from the sum of clipped changes in units."""
        deviation = self.noise_multiplier * self.privacy.clip
        return {
            slot: (summed + deviation * noise(slot, len(summed), summed.device)) * (units[slot] / self.cohort)
            for slot, summed in total.items()
        }


def clipped_sum(
    values: Mapping[str, Tensor], references: Mapping[str, Tensor], units: Mapping[str, Unit], clip: float
) -> dict[str, Tensor]:
    """Σ over the rows of their changes, in units, each row clipped over all slots together; float64 `[P]` per slot.

    `values` are the replies `[R, P]`, `references` what some of the slots started from `[P]`, the others from zero.

    >>> replies = {"x": torch.tensor([[3.0], [0.3]]), "m": torch.tensor([[5.0], [torch.nan]])}
    >>> clipped_sum(replies, {"m": torch.tensor([1.0])}, {"x": 1.0, "m": 1.0}, clip=1.0)
    {'x': tensor([0.6000], dtype=torch.float64), 'm': tensor([0.8000], dtype=torch.float64)}
    """
    like = next(iter(values.values()))
    total = {slot: each.new_zeros(each.shape[1:], dtype=torch.float64) for slot, each in values.items()}
    scale = {slot: unit for slot, unit in units.items() if not isinstance(unit, Tensor)}  # saves a pass over memory
    width = max(1, NUMBERS_AT_A_TIME // max(1, sum(each.shape[1] for each in values.values())))
    for start in range(0, len(like), width):
        rows = {slot: _change(each[start : start + width], references.get(slot)) for slot, each in values.items()}
        for slot, each in rows.items():
            if slot not in scale:
                each.div_(units[slot])
        norms = torch.stack([torch.linalg.vector_norm(each, dim=1) / scale.get(slot, 1) for slot, each in rows.items()])
        joint = norms.norm(dim=0)
        good = torch.isfinite(joint)
        factors = torch.where(good, clip / joint.clamp(min=clip), 0.0)
        bad = None if good.all() else ~good[:, None]
        for slot, each in rows.items():
            total[slot] += (factors @ (each if bad is None else each.masked_fill_(bad, 0.0))) / scale.get(slot, 1)
    return total


def _change(values: Tensor, reference: Tensor | None) -> Tensor:
    """A change in float64, in memory of its own."""
    own = values.to(torch.float64, copy=True)
    return own if reference is None else own.sub_(reference)


def seeded_noise(seed: int, round: int) -> Noise:
    """Noise by seed, round, slot and coordinate: the same on every engine, and known to everyone who has the seed."""

    def draw(slot: str, count: int, device: torch.device) -> Tensor:
        start = key(seed, NOISE, round, zlib.crc32(slot.encode()))
        pairs = torch.arange(-(-count // 2), device=device)
        return _normal(bits(start, 0, pairs), bits(start, 1, pairs))[:count]

    return draw


def secure_noise(slot: str, count: int, device: torch.device) -> Tensor:
    """Noise from the operating system's cryptographically secure generator."""
    parts = []
    for start in range(0, count, NUMBERS_AT_A_TIME):
        pairs = -(-min(count - start, NUMBERS_AT_A_TIME) // 2)
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(16 * pairs)), dtype=torch.int64)
        first, second = (drawn & ((1 << 63) - 1)).to(device).chunk(2)
        parts.append(_normal(first, second))
    return torch.cat(parts)[:count]


def _normal(first: Tensor, second: Tensor) -> Tensor:
    """Two standard normal numbers of each pair of uniform integers in [0, 2⁶³) (Box and Muller)."""
    radius = (((first >> 10) + 1).double() * 2.0**-53).log().mul(-2).sqrt()  # log of (0, 1]
    angle = (second >> 10).double() * (2.0**-53 * 2 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])
