"""Memory that several processes share, through which objects are shipped once.

An arena is an anonymous file: it has no name that could be left behind, and is freed with the last process that holds
it, however that process ends.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    dtype: torch.dtype
    shape: torch.Size


def arranged(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Place], int]:
    """Places for tensors like these, one after the other, and the bytes of all."""
    places, size = dict[str, Place](), 0
    for name, like in tensors.items():
        places[name] = Place(size, like.dtype, like.shape)
        size = _aligned(size + like.nbytes)
    return places, size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


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
        memory, tensors = torch.frombuffer(self.memory, dtype=torch.uint8), {}
        for name, (offset, dtype, shape) in places.items():
            tensors[name] = memory[offset:][: dtype.itemsize * shape.numel()].view(dtype).view(shape)
        return tensors

    def close(self) -> None:
        """Close the descriptor; the memory itself is freed with its last view."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fedlalr")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class TooLarge(ValueError):
    """Shipping an object takes more memory than allowed."""


def ship(value: object, *, most: float = math.inf, readers: int = 1) -> tuple[Arena, list[int]]:
    """Write an object into a new arena, its tensors and arrays as raw memory; returns where its pieces end.

    `most` limits the bytes in total: everything but raw memory is copied again by each of the `readers`.
    """
    shipper = _Shipper(most, readers)
    shipper.dump(value)
    pieces = {_STREAM: shipper.stream.getbuffer(), **shipper.raw}
    bounds, size = dict[Memory, tuple[int, int]](), 0
    for memory, piece in pieces.items():
        start = _aligned(size)
        size = start + piece.nbytes
        bounds[memory] = start, size
    arena = Arena.create(size)
    for memory, piece in pieces.items():
        arena.memory[slice(*bounds[memory])] = piece
    # Views of views in a reference cycle, as the shipper is one, crash Python 3.11's garbage collector.
    shipper.clear_memo()
    shipper.raw.clear()
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


@contextmanager
def pickled_by_value(values: Iterable[object]) -> Iterator[None]:
    """Let cloudpickle send the code of the values' classes and functions that another interpreter could not import."""
    owners = [owner for value in values for owner in (value.modules() if isinstance(value, nn.Module) else (value,))]
    names = {getattr(owner, "__module__", None) or type(owner).__module__ for owner in owners}
    modules = [sys.modules[name] for name in names & sys.modules.keys() - {"__main__"} if not _is_importable(name)]
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(name: str) -> bool:
    origin = getattr(sys.modules[name], "__file__", None)
    if origin is None:
        return name in sys.builtin_module_names
    tail = name.replace(".", os.sep)
    return not origin.endswith(".py") or any(
        os.path.realpath(os.path.join(root or ".", tail + end)) == os.path.realpath(origin)
        for root in sys.path
        for end in (".py", f"{os.sep}__init__.py")
    )
