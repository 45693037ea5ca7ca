"""Named tensors in one file, whose length and hash are recorded when it is written and verified when it is read."""

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
"""Most bytes for the names and shapes of a file's tensors."""


class Seal(NamedTuple):
    """Length and hash of a file when it was written."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Seal:
    """Write tensors and flush them to disk."""
    # Slots may share memory, which the format does not allow, so each is copied.
    content = save({name: storable(tensor).to("cpu", copy=True).contiguous() for name, tensor in tensors.items()})
    write_bytes(path, content)
    return Seal(len(content), hashlib.sha256(content).hexdigest())


def read_tensors(path: Path, seal: Seal, expected: int | None = None) -> dict[str, Tensor]:
    """The tensors of a file; raises `ValueError` if its length or hash does not match the seal.

    `expected` is the most bytes of tensors that can be in it, if known: the seal itself may be forged.
    """
    size = path.stat().st_size
    if size != seal.bytes:
        raise ValueError(f"{path.name} is damaged: it has {size:,} bytes, but {seal.bytes:,} were written")
    largest = free_memory(torch.device("cpu")) if expected is None else expected + LARGEST_HEADER
    content = read_file(path, largest)
    if hashlib.sha256(content).hexdigest() != seal.sha256:
        raise ValueError(f"{path.name} is damaged: its content does not match the hash taken when it was written")
    return load(content)


def take(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Pop a tensor and move it to `like`'s device; raises `ValueError` if its shape or dtype differs from `like`'s."""
    if name not in tensors:
        raise ValueError(f"there is no {name} in it")
    found = tensors.pop(name)
    if like.dtype == torch.complex128 and found.shape == (*like.shape, 2):
        found = torch.view_as_complex(found)
    if found.shape != like.shape or found.dtype != like.dtype:
        raise ValueError(
            f"its {name} is {tuple(found.shape)} {found.dtype}, but this run's is {tuple(like.shape)} {like.dtype}"
        )
    return found.to(like.device)


def storable(tensor: Tensor) -> Tensor:
    """The tensor; complex128, which the format does not support, as pairs of real numbers."""
    tensor = tensor.detach()
    return real_numbers(tensor) if tensor.dtype == torch.complex128 else tensor
