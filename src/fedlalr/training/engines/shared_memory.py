"""Memory that several processes share, through which objects are shipped once.

An arena is an anonymous file: it has no name that could be left behind, and is freed with the last process that holds
it, however that process ends.
"""

from __future__ import annotations

import importlib.util
import io
import math
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

_ALIGNMENT = 64

Memory = tuple[int, int]
"""Address and size. Memory that several objects share is written once."""
_STREAM: Memory = (0, 0)


class Place(NamedTuple):
    """The location of a tensor in an arena."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedMemoryPlan:
    """Lays out tensors one after the other."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.size = 0

    def add(self, name: str, shape: Iterable[int], dtype: torch.dtype) -> None:
        shape = tuple(shape)
        self.places[name] = Place(self.size, shape, dtype)
        count = torch.Size(shape).numel() * dtype.itemsize
        self.size += -(-max(count, 1) // _ALIGNMENT) * _ALIGNMENT


class Arena:
    """A piece of shared memory, by file descriptor."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor, self.size = descriptor, size
        self.memory = mmap.mmap(descriptor, size)

    @classmethod
    def create(cls, size: int) -> Arena:
        """New zeroed memory."""
        size = max(size, _ALIGNMENT)
        descriptor = _anonymous_file()
        os.ftruncate(descriptor, size)
        return cls(descriptor, size)

    @classmethod
    def open(cls, descriptor: int) -> Arena:
        """The memory of another process, from a descriptor of this process. Closes the descriptor; the memory stays."""
        try:
            return cls(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def tensors(self, places: Mapping[str, Place]) -> dict[str, Tensor]:
        """Views of the arena: all processes see what one of them writes."""
        return {name: self._view(place) for name, place in places.items()}

    def _view(self, place: Place) -> Tensor:
        count = torch.Size(place.shape).numel()
        if not count:
            return torch.empty(place.shape, dtype=place.dtype, device="cpu")
        return torch.frombuffer(self.memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)

    def close(self) -> None:
        """Close the descriptor; the memory itself is freed with its last view."""
        os.close(self.descriptor)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedlalr")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class TooLarge(ValueError):
    """Shipping an object takes more memory than allowed."""


def ship(
    value: object, by_value: Iterable[ModuleType] = (), *, most: float = math.inf, readers: int = 1
) -> tuple[Arena, list[int]]:
    """Write an object into a new arena, its tensors and arrays as raw memory; returns where its pieces end.

    `most` limits the bytes in total: everything but raw memory is copied again by each of the `readers`.
    """
    shipper = _Shipper(most, readers)
    modules = list(by_value)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        shipper.dump(value)
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    pieces = {_STREAM: shipper.stream.getbuffer(), **shipper.raw}
    bounds, size = dict[Memory, tuple[int, int]](), 0
    for memory, piece in pieces.items():
        start = -(-size // _ALIGNMENT) * _ALIGNMENT
        size = start + piece.nbytes
        bounds[memory] = start, size
    arena = Arena.create(size)
    for memory, piece in pieces.items():
        arena.memory[slice(*bounds[memory])] = piece
    return arena, [bound for memory in (_STREAM, *shipper.order) for bound in bounds[memory]]


def unship(arena: Arena, bounds: list[int]) -> Any:
    """Read an object that `ship` wrote. Its tensors are views of the arena: nothing is copied."""
    view = memoryview(arena.memory)
    pieces = [view[start:end] for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    return pickle.loads(pieces[0], buffers=pieces[1:])


class _Shipper(cloudpickle.Pickler):  # type: ignore[misc]
    """Cloudpickle that keeps the memory of plain tensors and arrays out of the stream and sends memory-mapped files by
    name."""

    def __init__(self, most: float, readers: int) -> None:
        self.stream = _Stream(self._check_size)
        self.raw: dict[Memory, memoryview] = {}
        self.order: list[Memory] = []
        """The raw memory that the stream refers to, in order."""
        self._size, self._most = 0, most
        self._copies = readers + 2  # of the stream: this one, the arena's, and one per reader
        super().__init__(self.stream, protocol=5, buffer_callback=self._add)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and not obj.requires_grad and obj.device.type == "cpu" and obj.numel():
            raw = obj.contiguous().view(-1).view(torch.uint8).numpy()
            return _tensor_from, (pickle.PickleBuffer(raw.data), obj.dtype, tuple(obj.shape))
        if type(obj) in (np.ndarray, np.memmap):
            file = _mapped_file(obj)
            if file is obj:
                mode = "r" if file.mode == "r" else "r+"
                order = "C" if obj.flags.c_contiguous else "F"
                return np.memmap, (os.fspath(file.filename), obj.dtype, mode, file.offset, obj.shape, order)
            if file is not None:
                start = obj.ctypes.data - file.ctypes.data
                return np.ndarray, (obj.shape, obj.dtype, file, start, obj.strides)
            if type(obj) is np.memmap:  # NumPy would write its bytes to the stream
                return np.asarray(obj).__reduce_ex__(5)
        return super().reducer_override(obj)

    def _add(self, buffer: pickle.PickleBuffer) -> None:
        raw = buffer.raw()
        memory = np.frombuffer(raw, np.uint8).ctypes.data, raw.nbytes
        if memory not in self.raw:
            self.raw[memory] = raw
            self._size += raw.nbytes
        self.order.append(memory)
        self._check_size()

    def _check_size(self) -> None:
        if self._size + self._copies * self.stream.tell() > self._most:
            raise TooLarge


class _Stream(io.BytesIO):
    """A pickle stream in memory whose size is checked as it grows."""

    def __init__(self, check: Callable[[], None]) -> None:
        super().__init__()
        self._check = check

    def write(self, data: Any, /) -> int:
        written = super().write(data)
        self._check()
        return written


def _mapped_file(array: Any) -> Any:
    """The memory-mapped file that an array is part of; None if there is none, or if it is a private copy."""
    while isinstance(array, np.ndarray) and not isinstance(array.base, mmap.mmap):
        array = array.base
    is_file = isinstance(array, np.memmap) and array.filename is not None and array.mode != "c"
    return array if is_file else None


def _tensor_from(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def unimportable_modules(values: Iterable[object]) -> Iterator[ModuleType]:
    """Modules that define the values' classes or functions and that another interpreter could not import."""
    seen: set[str] = set()
    for value in values:
        owners = [value, *value.modules()] if isinstance(value, nn.Module) else [value]
        for owner in owners:
            name = getattr(owner, "__module__", None) or type(owner).__module__
            if name in seen or name == "__main__" or name not in sys.modules:
                continue
            seen.add(name)
            if not _is_importable(name):
                yield sys.modules[name]


def _is_importable(name: str) -> bool:
    module = sys.modules[name]
    origin = getattr(module, "__file__", None)
    if origin is None:
        return name in sys.builtin_module_names
    parts = name.split(".")
    relative = os.path.join(*parts) + ".py", os.path.join(*parts, "__init__.py")
    if not origin.endswith(".py"):
        return importlib.util.find_spec(name) is not None
    return any(
        os.path.realpath(os.path.join(root or ".", tail)) == os.path.realpath(origin)
        for root in sys.path
        for tail in relative
    )
