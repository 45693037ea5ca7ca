"""Named tensors in one file, whose length and hash are noted when it is written and compared when it is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedlalr.common.files import write_bytes
from fedlalr.common.reading import read_file
from fedlalr.training.interfaces import real_numbers
from fedlalr.training.memory import free_memory

LARGEST_HEADER = 1 << 24
"""Bytes that the names and shapes of a file's tensors can take."""


class Seal(NamedTuple):
    """What the file was when it was written."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Seal:
    """Write tensors and flush them to the disk."""
    # Slots may share memory with one another, which the format does not allow: a copy of each.
    content = save({name: _storable(tensor).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})
    write_bytes(path, content)
    return Seal(len(content), hashlib.sha256(content).hexdigest())


def read_tensors(path: Path, seal: Seal, expected: int | None = None) -> dict[str, Tensor]:
    """The tensors, after the file's length and hash were found right; `ValueError` where they are not.

    `expected` are the bytes of tensors that can be in it, where that is known: the seal may be a forgery.
    """
    size = path.stat().st_size
    if size != seal.bytes:
        raise ValueError(f"{path.name} is damaged: it has {size:,} bytes, and {seal.bytes:,} were written")
    largest = free_memory(torch.device("cpu")) if expected is None else expected + LARGEST_HEADER
    content = read_file(path, largest)
    if hashlib.sha256(content).hexdigest() != seal.sha256:
        raise ValueError(f"{path.name} is damaged: its content does not match the hash taken when it was written")
    return load(content)


def take(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Remove a tensor from a table and put it on `like`'s device; `ValueError` where its shape or dtype is another."""
    if name not in tensors:
        raise ValueError(f"there is no {name} in it")
    found = tensors.pop(name)
    if like.dtype == torch.complex128 and found.shape == (*like.shape, 2):
        found = torch.view_as_complex(found)
    if found.shape != like.shape or found.dtype != like.dtype:
        raise ValueError(
            f"its {name} is {tuple(found.shape)} {found.dtype}, and this run's is {tuple(like.shape)} {like.dtype}"
        )
    return found.to(like.device)


def _storable(tensor: Tensor) -> Tensor:
    """The tensor, or the pairs that complex numbers of double precision are, which the format does not know."""
    tensor = tensor.detach()
    return real_numbers(tensor) if tensor.dtype == torch.complex128 else tensor
