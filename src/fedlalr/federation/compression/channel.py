"""What a compression does to the slots on their way down and up: encoding, decoding, sizes.

    b̃ = decode(encode(b))                                    what the client starts from
    u = decode(encode(uᵢ − b̃ + eᵢ))                          what the server receives; eᵢ = 0 without feedback
    eᵢ ← (uᵢ − b̃ + eᵢ) − u                                   kept by the client if its reply is accepted
    next value = b + (reduced replies − b̃)                   so the server's value has no error of the broadcast

The simulator encodes and decodes stacks on the run's device; on Flower, a node and the server do one half each.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.data.random import ROUNDING, bits, key
from fedlalr.federation.compression.codecs import Codec, Draw, has_feedback
from fedlalr.federation.compression.compression import Compression, residual
from fedlalr.training.interfaces import Replies, Training

SERVER = -1
"""In place of a client's id, in the random numbers of the broadcast."""
NUMBERS_AT_A_TIME = 1 << 24
"""Maximum number of values that are encoded at once, which bounds the memory of random numbers."""


@dataclass(frozen=True)
class Channel:
    """The two directions of one round."""

    compression: Compression
    slots: SlotTable
    """All slots of the algorithm."""
    count: int
    """The coordinates that are shared."""
    dtype: torch.dtype
    seed: int
    round: int
    parameters: int = 1
    """The number of parameter tensors they belong to: slots in `blocks` have a number for each."""

    @classmethod
    def of(cls, compression: Compression, training: Training, round: int) -> Channel:
        shared = training.division.shared
        table, seed = training.algorithm.slots, training.seed
        return cls(compression, table, shared.size, shared.dtype, seed, round, len(shared.names))

    @property
    def table(self) -> SlotTable:
        """The slots that travel in this round."""
        waiting = self.compression.waiting(self.round)
        if not waiting:
            return self.slots
        up = {slot: how for slot, how in self.slots.up.items() if slot not in waiting}
        return replace(self.slots, up=up, grows=tuple(slot for slot in self.slots.grows if slot in up))

    def encode_broadcast(self, slots: Slots) -> dict[str, Tensor]:
        """The bytes `[size]` of every slot that has a codec."""
        content = {}
        for name, codec in self.compression.down.items():
            values = slots[name][None]
            encoded = codec.encode(values, None, self._draw(name, [SERVER], values))
            content[name] = _checked(encoded, name, (1, self.size_down(name)), torch.uint8)[0]
        return content

    def decode_broadcast(self, name: str, content: Tensor) -> Tensor:
        """A slot `[P]` from its bytes."""
        return self._decoded(self.compression.down[name], name, content[None], None)[0]

    def decoded_broadcast(self, slots: Slots, content: Mapping[str, Tensor]) -> Slots:
        """The slots as clients decode them."""
        return slots.replace(**{name: self.decode_broadcast(name, each) for name, each in content.items()})

    def broadcast(self, slots: Slots) -> Slots:
        """The slots as clients decode them, encoded and decoded here."""
        return self.decoded_broadcast(slots, self.encode_broadcast(slots))

    def encode_reply(
        self, name: str, values: Tensor, broadcast: Slots, error: Tensor | None, clients: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """The bytes `[R, size]` of a slot of the replies, and what the clients keep if their replies are accepted.

        `error` is what they kept before; None without feedback.
        """
        codec, reference = self.compression.up[name], broadcast.get(name)
        draw, shape = self._draw(name, clients, values), (len(values), self.size_up(name))
        if error is None:
            return _checked(codec.encode(values, reference, draw), name, shape, torch.uint8), None
        change = (values if reference is None else values - reference) + error
        content = _checked(codec.encode(change, None, draw), name, shape, torch.uint8)
        return content, change - self._decoded(codec, name, content, None)

    def decode_reply(self, name: str, content: Tensor, broadcast: Slots) -> Tensor:
        """A slot of the replies `[R, P]` from its bytes."""
        codec, reference = self.compression.up[name], broadcast.get(name)
        if reference is None or not has_feedback(codec):
            return self._decoded(codec, name, content, reference)
        return reference + self._decoded(codec, name, content, None)

    def replies(self, replies: Replies, broadcast: Slots, kept: Mapping[int, Slots]) -> Replies:
        """The replies as the server decodes them, with what their clients will keep."""
        ids: list[int] = replies.clients[replies.spread.held].tolist()
        slots = {name: replies.slots[name] for name in self.table.up}
        errors = {name: self._errors(name, kept, ids, broadcast.x) for name in self.compression.with_feedback}
        for name in self.compression.up:
            if name in slots:
                slots[name], new = self._sent(name, slots[name], broadcast, errors.get(name), ids)
                if new is not None:
                    errors[name] = new
        residuals = {residual(name): error for name, error in errors.items()}
        return replace(replies, slots=Slots(**slots), kept=replies.kept.replace(**residuals))

    def upload(self, slots: Slots, broadcast: Slots, kept: Slots, client: int) -> tuple[Slots, dict[str, Tensor]]:
        """One client's bytes `[size]` of the slots that have a codec, and the errors that it will keep."""
        content, errors = {}, {name: kept[residual(name)][None] for name in self.compression.with_feedback}
        for name in self.compression.up:
            if name in self.table.up:
                encoded, error = self.encode_reply(name, slots[name][None], broadcast, errors.get(name), [client])
                content[name] = encoded[0]
                if error is not None:
                    errors[name] = error
        return Slots(**{residual(name): error[0] for name, error in errors.items()}), content

    def rebased(self, reduced: Slots, broadcast: Slots, server: Slots) -> Slots:
        """The reduced replies as changes of the server's own values; a slot that was not sent stays as it is."""
        found = {name: reduced[name] if name in reduced else server[name] for name in self.slots.up}
        for name in self.compression.down:
            if name in reduced:
                found[name] = server[name] + (reduced[name] - broadcast[name])
        return Slots(**found)

    @property
    def bytes_up(self) -> int:
        """Bytes of one reply's slots in this round."""
        return sum(self.size_up(name) for name in self.table.up)

    @property
    def bytes_down(self) -> int:
        """Bytes of the broadcast's slots for one client."""
        return sum(self.size_down(name) for name in self.slots.down)

    def size_up(self, name: str) -> int:
        """Bytes of a slot of one reply."""
        codec = self.compression.up.get(name)
        return self._size(name, codec, name in self.slots.down and not has_feedback(codec))

    def size_down(self, name: str) -> int:
        """Bytes of a slot of the broadcast."""
        return self._size(name, self.compression.down.get(name), False)

    def _size(self, name: str, codec: Codec | None, reference: bool) -> int:
        if codec is not None:
            return codec.size(self.count, self.dtype, reference)
        return (self.parameters if name in self.slots.blocks else self.count) * self.dtype.itemsize

    def _sent(
        self, name: str, values: Tensor, broadcast: Slots, error: Tensor | None, ids: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """A slot as the server decodes it and the clients' new error, some rows at a time."""
        arrived, new = torch.empty_like(values), None if error is None else torch.empty_like(error)
        width = max(1, NUMBERS_AT_A_TIME // max(self.count, 1))
        for start in range(0, len(ids), width):
            rows = slice(start, start + width)
            before = None if error is None else error[rows]
            content, after = self.encode_reply(name, values[rows], broadcast, before, ids[rows])
            arrived[rows] = self.decode_reply(name, content, broadcast)
            if new is not None and after is not None:
                new[rows] = after
        return arrived, new

    def _decoded(self, codec: Codec, name: str, content: Tensor, reference: Tensor | None) -> Tensor:
        values = codec.decode(content, reference, self.count, self.dtype)
        return _checked(values, name, (len(content), self.count), self.dtype)

    def _errors(self, name: str, kept: Mapping[int, Slots], ids: Sequence[int], like: Tensor) -> Tensor:
        """The errors that clients kept, stacked; zero at the start."""
        zero = torch.zeros_like(like)
        rows = [kept[client][residual(name)] if client in kept else zero for client in ids]
        return torch.stack(rows) if rows else like.new_empty(0, len(like))

    def _draw(self, name: str, clients: Sequence[int], like: Tensor) -> Draw:
        """Random numbers by seed, round, slot, client and coordinate."""
        start = key(self.seed, ROUNDING, self.round, zlib.crc32(name.encode()))

        def draw() -> Tensor:
            who = torch.tensor(clients, dtype=torch.int64, device="cpu").to(like.device, non_blocking=True)
            where = torch.arange(like.shape[1], device=like.device)
            # as many bits as the fraction of the dtype has, so that the conversion is exact
            digits = 53 if like.dtype == torch.float64 else 24
            return (bits(start, who[:, None], where) >> (63 - digits)).to(like.dtype) * 2.0**-digits

        return draw


def _checked(found: Tensor, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """What a codec returned, which may be the user's own and must not be broadcast or counted wrongly."""
    if tuple(found.shape) != shape or found.dtype != dtype:
        given = f"{found.dtype} {tuple(found.shape)}"
        raise ValueError(f"the codec of {name} returned {given}, but {dtype} {shape} is expected")
    return found
