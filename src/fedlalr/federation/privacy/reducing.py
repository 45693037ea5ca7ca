"""A round's replies reduced privately: summed as they come, released once."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Algorithm, Slots, SlotTable
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import starting_value
from fedlalr.federation.privacy.mechanism import Mechanism, Noise, Unit, clipped_sum
from fedlalr.federation.privacy.privacy import public_steps
from fedlalr.federation.privacy.second_moment import derived, scales
from fedlalr.federation.replies.reductions import BUFFERS
from fedlalr.federation.replies.screening import VARIANCE, buffer_changes, name_in_layer
from fedlalr.training.interfaces import Buffers, Training, Work, real_numbers
from fedlalr.training.ranks import ALONE, Ranks

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
        algorithm, privacy = self.training.algorithm, self.mechanism.privacy
        return derived(
            self.server.v_hat,
            change,
            self.mechanism.deviation(privacy.unit("x")) ** 2,
            self._layout,
            beta2=algorithm.betas[1],  # type: ignore[attr-defined]  # `is_derivable` checked both
            eps=algorithm.eps,  # type: ignore[attr-defined]
        )

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
