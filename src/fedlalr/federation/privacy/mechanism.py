"""The Gaussian mechanism: clip each client's joint change, sum, add noise, divide by the expected cohort.

    uᵢ = the changes of all slots of client i, each divided by its unit, joined      (0 if any number is not finite)
    S  = Σ min(1, C / ‖uᵢ‖) uᵢ                        one client more or less changes S by at most C, in norm
    mean change = (S + N(0, σ² C² I)) / n             in units again; n is public, the number of replies is not

`PrivateReduction` does this with a round's replies: summed as they come, released once.

All in float64. As in most implementations, the noise is made of floating-point numbers: it does not protect against
someone who sees all digits of the result and searches them for traces of rounding (Mironov, CCS 2012).
"""

from __future__ import annotations

import math
import secrets
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Algorithm, Slots, SlotTable
from fedlalr.data.random import NOISE, bits, key
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import starting_value
from fedlalr.federation.privacy.accounting import epsilon, solve_noise_multiplier
from fedlalr.federation.privacy.privacy import Privacy, public_steps
from fedlalr.federation.privacy.second_moment import derived, scales
from fedlalr.federation.replies.reductions import BUFFERS
from fedlalr.federation.replies.screening import VARIANCE, buffer_changes, name_in_layer
from fedlalr.training.interfaces import Buffers, Training, Work, real_numbers
from fedlalr.training.ranks import ALONE, Ranks

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
        if privacy.delta is not None and privacy.delta * population >= 1:
            warnings.warn(
                f"delta={privacy.delta:g} is not below 1 / {population} clients: publishing the data of one client "
                f"would satisfy it, so epsilon says little; use a much smaller delta",
                stacklevel=4,  # at the call of `fl.run`
            )
        if privacy.noise_multiplier is not None:
            given = cls(privacy, privacy.noise_multiplier, cohort, population, None)
            given.spend(1)  # a missing extra or a δ that is too small is an error before the first round
            return given
        assert privacy.epsilon is not None  # `Privacy` checked it, and
        assert privacy.delta is not None
        noise = solve_noise_multiplier(privacy.epsilon, cohort / population, rounds, privacy.delta)
        return cls(privacy, noise, cohort, population, rounds)

    def spend(self, round: int) -> float | None:
        """ε after a round, None without a δ; raises `BudgetSpent` before a round that would exceed the budget."""
        self.check_rounds(round)
        if self.privacy.delta is None:
            return None
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


SECOND_MOMENTS = ("v", "v_hat")


class PrivateReduction:
    """The sum of a round's clipped replies. `server` has the server's shared slots before the round."""

    def __init__(
        self, mechanism: Mechanism, training: Training, channel: Channel, work: Work, server: Slots, noise: Noise
    ) -> None:
        self.mechanism, self.training, self.channel, self.work = mechanism, training, channel, work
        self.server, self.noise = server, noise
        self._layout, privacy = training.division.shared, mechanism.privacy
        self._slots = tuple(channel.table.up)
        self._sizes = torch.tensor([prod(shape) for shape in self._layout.shapes], device="cpu")
        self._blocks = [slot for slot in self._slots if slot in channel.table.blocks]
        scale = scales(server, channel.table.up) if privacy.scaled else {}
        self._units: dict[str, Unit] = {
            slot: privacy.unit(slot) * self._without_repeats(slot, scale[slot]) if slot in scale else privacy.unit(slot)
            for slot in self._slots
        }
        self._references = {
            slot: self._without_repeats(slot, work.broadcast[slot]) for slot in self._slots if slot in work.broadcast
        }
        if BUFFERS in privacy.units:
            self._units[BUFFERS] = privacy.unit(BUFFERS)
        self.total: dict[str, Tensor] = {}
        """The sum so far, in units."""
        none = work.broadcast.x.new_empty(0, self._layout.size)
        self.add(Slots(**dict.fromkeys(self._slots, none)), {name: b[None][:0] for name, b in work.buffers.items()})

    def add(self, slots: Slots, buffers: Buffers) -> None:
        """Add replies `[R, …]` to the sum, each clipped."""
        values = {slot: self._without_repeats(slot, slots[slot]) for slot in self._slots}
        changes = buffer_changes(buffers, self.work.buffers) if BUFFERS in self._units else {}
        if changes:
            values[BUFFERS] = torch.cat([each.flatten(1) for each in changes.values()], 1)
        summed = clipped_sum(values, self._references, self._units, self.mechanism.privacy.clip)
        self.total = {name: self.total.get(name, 0.0) + each for name, each in summed.items()}

    def release(self, ranks: Ranks = ALONE) -> tuple[Slots, Buffers]:
        """What the algorithm's update gets in place of the mean replies, and the next buffers. Call it once."""
        mean = self.mechanism.release(ranks.sum(self.total), self._units, self.noise)
        changes = {slot: self._repeated(slot, mean[slot]) for slot in self._slots}
        broadcast, table = self.work.broadcast, self.channel.table
        reduced = {
            slot: (broadcast[slot] + change if slot in broadcast else change).to(self._layout.dtype)
            for slot, change in changes.items()
        }
        slots = self.channel.rebased(Slots(**reduced), broadcast, self.server)
        slots = slots.replace(**_floored(slots, table, self.training.algorithm))
        if self.mechanism.privacy.second_moment == "server":
            slots = slots.replace(v_hat=self._derived(changes["x"]))
        return slots, self._next_buffers(mean[BUFFERS]) if BUFFERS in mean else self.work.buffers

    @property
    def steps(self) -> Tensor:
        """The public number of local steps, for each client of an expected cohort; 1 if no method needs it."""
        return torch.full((self.mechanism.cohort,), public_steps(self.training.local, self.work.round) or 1)

    @property
    def share(self) -> Tensor:
        """The weight of each client of an expected cohort."""
        return torch.full((self.mechanism.cohort,), 1 / self.mechanism.cohort, dtype=torch.float64)

    def _derived(self, change: Tensor) -> Tensor:
        algorithm: Any = self.training.algorithm  # `is_derivable` checked that it has betas and eps
        variance = self.mechanism.deviation(self.mechanism.privacy.unit("x")) ** 2
        beta2, eps = algorithm.betas[1], algorithm.eps
        return derived(self.server.v_hat, change, variance, self._layout, beta2=beta2, eps=eps)

    def _next_buffers(self, change: Tensor) -> Buffers:
        """The buffers with their noised changes; whole numbers stay as they are, and variances above zero."""
        found = {name: buffer.clone() for name, buffer in self.work.buffers.items()}
        floats = {name: real_numbers(buffer) for name, buffer in found.items()}
        floats = {name: real for name, real in floats.items() if real.is_floating_point()}
        parts = torch.split(change, [real.numel() for real in floats.values()])
        for (name, real), part in zip(floats.items(), parts, strict=True):
            real += part.view(real.shape).to(real.dtype)
            if name_in_layer(name) == VARIANCE:
                real.clamp_(min=0.0)
        return found

    def _without_repeats(self, slot: str, values: Tensor) -> Tensor:
        """Values `[…, P]`; of a slot with one number for each parameter tensor, only that number."""
        firsts = (self._sizes.cumsum(0) - self._sizes).to(values.device)
        return values[..., firsts] if slot in self._blocks else values

    def _repeated(self, slot: str, values: Tensor) -> Tensor:
        return values.repeat_interleave(self._sizes.to(values.device)) if slot in self._blocks else values


def _floored(slots: Slots, table: SlotTable, algorithm: Algorithm) -> dict[str, Tensor]:
    """The slots whose roots are taken, at least at their initial value: ε² for v̂, and nothing more, since a floor at
    the broadcast would turn noise into growth."""
    found = {}
    for slot in table.up:
        start = starting_value(algorithm, slot)
        grows = slot in algorithm.slots.grows or slot in algorithm.slots.relative
        if slot != "x" and (slot in SECOND_MOMENTS or (grows and slot in table.down) or start > 0):
            found[slot] = slots[slot].clamp(min=start)
    return found
