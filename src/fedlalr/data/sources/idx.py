"""MNIST and Fashion-MNIST: four idx files, plain or gzipped.

An idx file is a big-endian header (two zero bytes, the type, the number of dimensions, the dimensions) and the values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from fedlalr.common.reading import read_file
from fedlalr.data.fetch import LARGEST, DataCorrupt, Fact
from fedlalr.data.sources.archive import gunzip
from fedlalr.data.sources.rawdata import Arrays, Images, facts

FILES: Final = {
    "inputs": "train-images-idx3-ubyte",
    "targets": "train-labels-idx1-ubyte",
    "test_inputs": "t10k-images-idx3-ubyte",
    "test_targets": "t10k-labels-idx1-ubyte",
}
_BYTES: Final = 0x08


@dataclass(frozen=True)
class IdxSet:
    """An image data set in four idx files, with the checksum of each file when unpacked."""

    images: Images
    facts: Mapping[str, Fact]
    formats: ClassVar[str] = f"the files {', '.join(FILES.values())} (plain or .gz)"

    def holds(self, folder: Path) -> bool:
        """Whether a folder has any of the files."""
        return any(_located(folder, name) is not None for name in FILES.values())

    def from_folder(self, folder: Path) -> Arrays:
        """Read the four files of a folder."""
        places = {name: path for name in FILES.values() if (path := _located(folder, name))}
        if missing := [name for name in FILES.values() if name not in places]:
            raise DataCorrupt(f"{folder} is incomplete: missing {', '.join(missing)} (plain or .gz)")
        return self.decode({name: (str(path), read_file(path, LARGEST)) for name, path in places.items()})

    def decode(self, contents: Mapping[str, tuple[str, bytes]]) -> Arrays:
        """Arrays from (where, bytes) of the four files. Checksums are verified before any byte is interpreted."""
        arrays = {key: self._read(name, *contents[name]) for key, name in FILES.items()}
        return {key: array[:, None] if "inputs" in key else array for key, array in arrays.items()}

    def check_checksums(self, arrays: Arrays, where: str) -> None:
        """Reject arrays that, written as idx files, differ from the original files."""
        for key, name in FILES.items():
            values = arrays[key].reshape(-1, *self.images.shape[1:]) if "images" in name else arrays[key]
            self.facts[name].check(encode(values), f"{name} of {where}, as an idx file,")

    def _read(self, name: str, where: str, content: bytes) -> NDArray[np.uint8]:
        fact = self.facts[name]
        if content[:2] == b"\x1f\x8b":
            content = gunzip(content, where, limit=fact.size or len(content))
        fact.check(content, where)
        return parse(content)


def encode(values: NDArray[np.uint8]) -> bytes:
    """Unsigned bytes as an idx file: what `parse` reads."""
    header = bytes([0, 0, _BYTES, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.tobytes()


def _located(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def parse(content: bytes) -> NDArray[np.uint8]:
    """The values of an idx file of unsigned bytes.

    >>> parse(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 9])).tolist()
    [7, 9]
    """
    dimensions = content[3]
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


MNIST: Final = IdxSet(
    Images(
        name="mnist",
        shape=(1, 28, 28),
        train_counts=(5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        test_counts=(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
        class_names=tuple("0123456789"),
    ),
    facts=facts("mnist"),
)

FASHION: Final = IdxSet(
    Images(
        name="fashion",
        shape=(1, 28, 28),
        train_counts=(6000,) * 10,
        test_counts=(1000,) * 10,
        class_names=(
            "t-shirt",
            "trousers",
            "pullover",
            "dress",
            "coat",
            "sandal",
            "shirt",
            "sneaker",
            "bag",
            "ankle boot",
        ),
    ),
    facts=facts("fashion"),
)
