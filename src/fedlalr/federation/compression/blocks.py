"""Blocks of numbers, and their bytes."""

from __future__ import annotations

import torch
from torch import Tensor


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
