"""How a slot is written in fewer bytes.

| codec      | what it writes                                                            | bytes a parameter      |
|------------|---------------------------------------------------------------------------|------------------------|
| `BFloat16` | the change, rounded to bfloat16                                           | 2                      |
| `Int`      | the change as whole multiples of a step, for each block of numbers        | 1 or ½, + 2 a block    |
| `Log`      | the logarithm of the growth, in steps of equal size, for each block       | 1 or ½, + 2 a block    |

A change or a growth is measured from a reference: the broadcast that the client decoded. A broadcast has no reference:
`BFloat16` and `Int` then write the numbers themselves, and `Log` their growth over the smallest of the block, which it
also sends (4 more bytes a block). Both sides compute with exact operations only, so they decode the same bits.

Numbers that are not finite, and falls that `Log` cannot write, decode to numbers that are not finite: the server then
rejects the reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedlalr.common.option_types import Bounds, Checked

Draw = Callable[[], Tensor]
"""Returns uniform random numbers in [0, 1), one for each value, from the counter-based generator."""

Block = Annotated[int, Bounds(ge=1, le=1 << 20)]


@runtime_checkable
class Codec(Protocol):
    """Writes stacks of numbers `[R, P]` as bytes `[R, size]` and reads them, on their own device.

    Write your own as a frozen dataclass. `decode` gets bytes of the right size, but they may come from anyone. A codec
    with an attribute `feedback` that is true gets the error of its last reply added to the next change.
    """

    def size(self, count: int, dtype: torch.dtype, reference: bool) -> int:
        """Bytes for `count` numbers of a dtype, with or without a reference."""

    def encode(self, values: Tensor, reference: Tensor | None, draw: Draw) -> Tensor:
        """Values `[R, P]` as uint8 `[R, size]`. The reference `[P]` is what the other side has; None: nothing."""

    def decode(self, content: Tensor, reference: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
        """The inverse of `encode`, up to its rounding: values `[R, count]`."""


@dataclass(frozen=True)
class BFloat16:
    """Rounds changes to bfloat16: three digits, and the range of float32."""

    def size(self, count: int, dtype: torch.dtype, reference: bool) -> int:
        return 2 * count

    def encode(self, values: Tensor, reference: Tensor | None, draw: Draw) -> Tensor:
        return _change(values, reference).to(torch.bfloat16).contiguous().view(torch.uint8)

    def decode(self, content: Tensor, reference: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
        return _applied(content.contiguous().view(torch.bfloat16).to(dtype), reference)


@dataclass(frozen=True)
class _Blocks(Checked):
    """Codes of some bits, and one scale for each block of numbers."""

    bits: Literal[8, 4] = 8
    block: Block = 256

    def _codes(self, count: int) -> int:
        """Bytes of the codes."""
        return -(-count * self.bits // 8)

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)


@dataclass(frozen=True)
class Int(_Blocks):
    """Writes changes as whole multiples of a step, in blocks: the step is the block's largest change, divided by 127
    (8 bits) or 7 (4 bits).

    rounding: "stochastic", which is right on average, or "nearest".
    feedback: the client adds the error of its last accepted reply to its next change.
    """

    rounding: Literal["stochastic", "nearest"] = "stochastic"
    feedback: bool = False

    def size(self, count: int, dtype: torch.dtype, reference: bool) -> int:
        return self._codes(count) + 2 * self._blocks(count)

    def encode(self, values: Tensor, reference: Tensor | None, draw: Draw) -> Tensor:
        change = in_blocks(_change(values, reference), self.block)
        scale = _short(change.abs().amax(-1, keepdim=True))
        # A quotient is at most 1, because the scale was rounded up, and not a number only if the scale is 0 or invalid.
        steps = (change / _long(scale, change.dtype)).nan_to_num(0.0) * self._most
        if self.rounding == "nearest":
            codes = steps.round()
        else:
            low = steps.floor()
            codes = low + (in_blocks(draw(), self.block) < steps - low)
        codes = codes.to(torch.int8).flatten(1)[:, : values.shape[1]].view(torch.uint8)
        return joined(pack(codes, self.bits), scale)

    def decode(self, content: Tensor, reference: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
        blocks, start = self._blocks(count), self._codes(count)
        codes = unpack(content[:, :start], self.bits, count).view(torch.int8)
        if self.bits == 4:
            codes = (codes << 4) >> 4  # extends the sign
        scale = taken(content, start, torch.int16, blocks)
        products = in_blocks(codes, self.block).to(dtype) * _long(scale[..., None], dtype)
        return _applied((products / _on(products, self._most)).flatten(1)[:, :count], reference)

    @property
    def _most(self) -> int:
        return (1 << (self.bits - 1)) - 1


@dataclass(frozen=True)
class Log(_Blocks):
    """Writes the growth of slots that are never negative in equal steps of its logarithm, in blocks; never below the
    reference, or below the smallest number of a block.

    Up, only for slots that can only grow; down, also for others that stay above zero. The logarithm is the number's
    bit pattern, which is linear between powers of two: a step changes a number by the same share, up to a factor of 2.
    """

    bits: Literal[8, 4] = 4

    def size(self, count: int, dtype: torch.dtype, reference: bool) -> int:
        return self._codes(count) + (2 if reference else 2 + dtype.itemsize) * self._blocks(count)

    def encode(self, values: Tensor, reference: Tensor | None, draw: Draw) -> Tensor:
        numbers = in_blocks(values, self.block)
        base = numbers.amin(-1, keepdim=True) if reference is None else in_blocks(reference[None], self.block)
        valid = (numbers >= base) & (base >= 0) & torch.isfinite(numbers)
        growth = torch.where(valid, _bits(numbers) - _bits(base), _WHOLE[values.dtype][2])
        width = _octaves(growth.amax(-1, keepdim=True), values.dtype)
        steps = growth.to(values.dtype) / _wide(width, values.dtype)
        codes = (steps.nan_to_num(0.0) * self._most).round()
        codes = codes.to(torch.uint8).flatten(1)[:, : values.shape[1]]
        return joined(pack(codes, self.bits), width, *([base] if reference is None else []))

    def decode(self, content: Tensor, reference: Tensor | None, count: int, dtype: torch.dtype) -> Tensor:
        blocks, start = self._blocks(count), self._codes(count)
        codes = unpack(content[:, :start], self.bits, count)
        width = _wide(taken(content, start, torch.float16, blocks)[..., None], dtype)
        if reference is None:
            base = taken(content, start + 2 * blocks, dtype, blocks)[..., None]
        else:
            base = in_blocks(reference[None], self.block)
        products = in_blocks(codes, self.block).to(dtype) * width
        kind, _, infinity = _WHOLE[dtype]
        growth = (products / _on(products, self._most)).round()
        growth = growth.masked_fill(~(width >= 0) | ~(growth <= infinity), infinity)
        reached = torch.minimum(growth.to(kind), infinity - _bits(base)) + _bits(base)
        values = torch.where(base >= 0, reached.view(dtype), torch.nan)  # also if the base is not a number
        return values.flatten(1)[:, :count]

    @property
    def _most(self) -> int:
        return (1 << self.bits) - 1


def has_feedback(codec: Codec | None) -> bool:
    """Whether clients keep the errors of a codec."""
    return bool(getattr(codec, "feedback", False))


def _change(values: Tensor, reference: Tensor | None) -> Tensor:
    return values if reference is None else values - reference


def _applied(change: Tensor, reference: Tensor | None) -> Tensor:
    return change if reference is None else reference + change


def _on(like: Tensor, number: int) -> Tensor:
    """A number as a tensor: on a GPU, torch multiplies by the inverse of a plain number, which is not the same."""
    return like.new_full((), number)


def _short(largest: Tensor) -> Tensor:
    """Numbers that are not negative as 16 bits, rounded up: the exponent of float32 and 8 bits of its fraction.

    float16 has more digits, but second moments are smaller than its smallest number.
    """
    single = largest.float()
    bits = single.view(torch.int32) + (single < largest)  # a float64 that was rounded down
    bits = bits.masked_fill(torch.isnan(single), _INFINITE)  # a GPU's NaN is 0x7FFFFFFF, and adding to it overflows
    return ((bits + 0x7FFF) >> 15).to(torch.int16)


def _long(short: Tensor, dtype: torch.dtype) -> Tensor:
    return ((short.to(torch.int32) & 0xFFFF) << 15).view(torch.float32).to(dtype)


_INFINITE = 0x7F800000
_WHOLE = {torch.float32: (torch.int32, 23, _INFINITE), torch.float64: (torch.int64, 52, 0x7FF << 52)}
"""dtype → whole numbers of its size, the bits of its fraction, and the bit pattern of infinity."""


def _bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(_WHOLE[numbers.dtype][0])


def _octaves(growth: Tensor, dtype: torch.dtype) -> Tensor:
    """The growth of a bit pattern in powers of two, as float16, rounded up."""
    exact = growth.double() / _on(growth.double(), 1 << _WHOLE[dtype][1])
    half = exact.half()
    return torch.where(half.double() < exact, (half.view(torch.int16) + 1).view(torch.float16), half)


def _wide(octaves: Tensor, dtype: torch.dtype) -> Tensor:
    return octaves.to(dtype) * (1 << _WHOLE[dtype][1])


def in_blocks(values: Tensor, block: int) -> Tensor:
    """`[R, P]` as `[R, B, block]`. The last number is repeated to fill the last block, which changes no extreme."""
    missing = -values.shape[1] % block
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], 1)
    return values.reshape(len(values), values.shape[1] // block, block)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes, uint8 `[R, P]`, as bytes: two codes of 4 bits in each.

    >>> pack(torch.tensor([[1, 2, 3]], dtype=torch.uint8), 4)
    tensor([[33,  3]], dtype=torch.uint8)
    """
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = torch.cat([codes, codes.new_zeros(len(codes), 1)], 1)
    return (codes[:, ::2] & 0xF) | (codes[:, 1::2] << 4)


def unpack(content: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`, for `count` codes."""
    if bits == 8:
        return content
    return torch.stack([content & 0xF, content >> 4], 2).flatten(1)[:, :count]


def joined(*parts: Tensor) -> Tensor:
    """The bytes of several tensors `[R, …]`, one after another."""
    return torch.cat([part.flatten(1).contiguous().view(torch.uint8) for part in parts], 1)


def taken(content: Tensor, start: int, dtype: torch.dtype, count: int) -> Tensor:
    """`count` numbers of a dtype from a byte on. They are copied: a number must start at a multiple of its size."""
    part = content[:, start : start + count * dtype.itemsize]
    return part.clone(memory_format=torch.contiguous_format).view(dtype)
