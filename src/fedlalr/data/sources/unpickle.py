"""Reading a pickle of plain arrays without running anything that is in it.

A pickle is a program: it names functions and calls them. This reader resolves every name to an inert stand-in of its
own, so not even NumPy is called by the file; names that CIFAR's archives do not use are rejected.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fedlalr.data.fetch import DataCorrupt


def plain(content: bytes, where: str) -> dict[str, Any]:
    """The dict of a pickle, with byte arrays, texts, integers and lists as values. `where` names the file in errors."""
    try:
        _check_memo(content)
        return _settle(_PlainUnpickler(content).load())
    except DataCorrupt as error:
        raise DataCorrupt(f"{where} is rejected: {error}") from None
    except Exception as error:
        # The content may be any byte string, on which the unpickler can fail with any error.
        raise DataCorrupt(f"{where} is not a readable pickle: {type(error).__name__}: {error}") from error


class _Type:
    """Stands in for `numpy.dtype`: only keeps the name."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name.decode("ascii") if isinstance(name, bytes) else str(name)

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which are irrelevant for single bytes."""


class _ArrayMark:
    """Stands in for the class `numpy.ndarray`, which the file names but may not call."""

    def __init__(self, *_: object) -> None:
        raise DataCorrupt("it builds an array in a way that CIFAR's files do not")


class _Array:
    """Stands in for an array under construction; becomes a real one only if it consists of plain bytes."""

    def __init__(self, *_: object) -> None:
        self.value: NDArray[np.uint8] | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(), tuple() as shape, _Type(name="u1" | "uint8" | "|u1"), False | 0, bytes() as raw):
                if not all(isinstance(n, int) and n >= 0 for n in shape) or math.prod(shape) != len(raw):
                    raise DataCorrupt(f"an array of shape {shape} does not have {len(raw):,} bytes")
                self.value = np.frombuffer(raw, np.uint8).reshape(shape)
            case _:
                raise DataCorrupt("it contains an array that does not consist of plain unsigned bytes")


def _encode(text: object, encoding: object) -> bytes:
    """The way Python 3 writes bytes in old pickle protocols."""
    if not isinstance(text, str) or encoding != "latin1":
        raise DataCorrupt("it encodes text in a way that CIFAR's files do not")
    return text.encode("latin1")


_STAND_INS: dict[tuple[str, str], Any] = {
    ("numpy", "dtype"): _Type,
    ("numpy", "ndarray"): _ArrayMark,
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("_codecs", "encode"): _encode,
}


def _check_memo(content: bytes) -> None:
    """Reject memo indices that no real file has: the unpickler allocates memory for all indices up to the largest.

    Otherwise five bytes could allocate 64 GiB. Every memo entry takes at least one byte of the file.
    """
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(content):
            raise DataCorrupt(f"it has a memo index of {argument:,}, but only {len(content):,} bytes")


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _STAND_INS[module, name]
        except KeyError:
            raise DataCorrupt(f"it names {module}.{name}, but only plain arrays are unpickled") from None

    def persistent_load(self, pid: object) -> NoReturn:
        raise DataCorrupt("it refers to an object outside the file")


def _settle(found: object) -> dict[str, Any]:
    """The file's dict with text as keys and real arrays for the stand-ins. CIFAR nests nothing deeper than a list."""
    if not isinstance(found, dict):
        raise DataCorrupt(f"it contains a {type(found).__name__}, but CIFAR's files contain a dict")
    return {_text(name): _value(item) for name, item in found.items()}


def _text(name: object) -> str:
    if isinstance(name, bytes):
        return name.decode("latin1")
    if isinstance(name, str):
        return name
    raise DataCorrupt(f"it uses a {type(name).__name__} as a key")


def _value(item: object) -> Any:
    match item:
        case _Array(value=np.ndarray() as array):
            return array
        case int() | str() | bytes():
            return item
        case list() if all(isinstance(entry, int | str | bytes) for entry in item):
            return item
    raise DataCorrupt(
        f"it contains a {type(item).__name__.strip('_')}, but only plain arrays, lists, texts and numbers are read"
    )
