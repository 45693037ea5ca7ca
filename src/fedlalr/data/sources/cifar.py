"""CIFAR-10 and CIFAR-100: the original python and binary archives, packed or unpacked, and PNG sheets of CIFAR-10."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlalr.data.fetch import Fact
from fedlalr.data.sources import archive, unpickle
from fedlalr.data.sources.rawdata import Arrays, Images, facts, images_and_labels

_PIXELS: Final = 3 * 32 * 32
_BATCHES: Final = tuple(f"data_batch_{i}" for i in range(1, 6))
_BINARY_BATCHES: Final = tuple(f"{name}.bin" for name in _BATCHES)


class LabelledImages(NamedTuple):
    """The content of one file: images `[n, 3, 32, 32]` and labels `[n]`."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]

    def records(self) -> bytes:
        """The content in CIFAR-10's binary format, so that its checksum does not depend on how it was stored."""
        return np.column_stack([self.labels, self.images.reshape(len(self.images), -1)]).tobytes()


@dataclass(frozen=True)
class RecordLayout:
    """One original format: the archive, the folder in it, and the files of the training and the test part."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    facts: Mapping[str, Fact]
    decode: Callable[[bytes, str], LabelledImages] = field(repr=False)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)


@dataclass(frozen=True)
class Cifar:
    """A CIFAR data set: its expected shape and class counts, and its original formats."""

    images: Images
    layouts: tuple[RecordLayout, ...]

    @property
    def formats(self) -> str:
        """What a folder must contain."""
        return " or ".join(f"{layout.archive} (or the folder {layout.folder} from it)" for layout in self.layouts)

    def holds(self, folder: Path) -> bool:
        """Whether a path is a folder with one of the original formats, or the archive of one."""
        return any(_located(layout, folder) is not None for layout in self.layouts)

    def from_folder(self, folder: Path) -> Arrays:
        """Read the first original format found in a folder that has one."""
        places = ((layout, _located(layout, folder)) for layout in self.layouts)
        layout, place = next((layout, place) for layout, place in places if place is not None)
        return decode(layout, _contents(layout, place))

    def check_checksums(self, arrays: Arrays, where: str) -> None:
        """Reject arrays that, cut into the binary files of CIFAR-10, differ from them. Those of CIFAR-100 also have
        coarse labels, which arrays lack."""
        if self.images.name != "cifar10":
            return
        layout = self.layouts[1]
        images, labels = (
            [*np.array_split(arrays[name], len(layout.train)), arrays[f"test_{name}"]] for name in ("inputs", "targets")
        )
        for name, part in zip(layout.files, map(LabelledImages, images, labels), strict=True):
            layout.facts[name].check(part.records(), f"{name.removesuffix('.bin')} of {where}, as binary records,")


def decode(layout: RecordLayout, contents: Mapping[str, tuple[str, bytes]]) -> Arrays:
    """Arrays from (where, bytes) of every file. Checksums are verified before any byte is interpreted."""
    parts: list[LabelledImages] = []
    for name in layout.files:
        where, content = contents[name]
        layout.facts[name].check(content, where)
        parts.append(layout.decode(content, where))
    return join(parts[:-1], parts[-1])


def join(train: list[LabelledImages], test: LabelledImages) -> Arrays:
    """The parts joined to the arrays of a data set."""
    inputs, targets = (np.concatenate([getattr(part, name) for part in train]) for name in ("images", "labels"))
    return images_and_labels(inputs, targets, test.images, test.labels)


def read_python(content: bytes, where: str, labels: str = "labels") -> LabelledImages:
    """A file of the python archive: a pickled dict of pixels and labels."""
    found = unpickle.plain(content, where)
    return LabelledImages(found["data"].reshape(-1, 3, 32, 32), np.array(found[labels], dtype=np.uint8))


def read_binary(content: bytes, where: str, label_bytes: int = 1) -> LabelledImages:
    """A file of the binary archive: rows of one label (CIFAR-100: the coarse and the fine one) and 3,072 pixels."""
    rows = np.frombuffer(content, np.uint8).reshape(-1, label_bytes + _PIXELS)
    images = np.ascontiguousarray(rows[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return LabelledImages(images, rows[:, label_bytes - 1].copy())


def read_sheets(contents: Mapping[str, bytes]) -> Arrays:
    """The npm package: one PNG per file with one image per row of pixels, in reading order; labels as JSON."""
    *train, test = (_sheet(contents[f"{name}.png"]) for name in (*_BATCHES, "test_batch"))
    labels = [np.array(json.loads(contents[f"{part}_lables.json"]), np.uint8) for part in ("train", "test")]
    return images_and_labels(np.concatenate(train), labels[0], test, labels[1])


SHEETS: Final = (*(f"{name}.png" for name in (*_BATCHES, "test_batch")), "train_lables.json", "test_lables.json")
"""The files of the npm package."""


def _sheet(content: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(content), formats=["PNG"]) as sheet:
        return np.ascontiguousarray(np.asarray(sheet).reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _located(layout: RecordLayout, folder: Path) -> Path | None:
    """The folder or archive with a format's files, either the path itself or inside it."""
    if folder.is_file():
        return folder if folder.name == layout.archive else None
    for unpacked in (folder / layout.folder, folder):
        if any((unpacked / name).is_file() for name in layout.files):
            return unpacked
    packed = folder / layout.archive
    return packed if packed.is_file() else None


def _contents(layout: RecordLayout, place: Path) -> dict[str, tuple[str, bytes]]:
    """(where, bytes) of a format's files."""
    if place.is_dir():
        found = archive.from_folder(place, layout.files)
        return {name: (str(place / name), content) for name, content in found.items()}
    layout.facts[layout.archive].check_file(place)
    found = archive.from_tar(place, layout.files)
    return {name: (f"{place}: {name}", content) for name, content in found.items()}


def _layout(
    name: str, folder: str, train: tuple[str, ...], test: str, decode: Callable[[bytes, str], LabelledImages]
) -> RecordLayout:
    return RecordLayout(f"{name}.tar.gz", folder, train, test, facts(name), decode)


CIFAR10: Final = Cifar(
    Images(
        name="cifar10",
        shape=(3, 32, 32),
        train_counts=(5000,) * 10,
        test_counts=(1000,) * 10,
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    (
        _layout("cifar-10-python", "cifar-10-batches-py", _BATCHES, "test_batch", read_python),
        _layout("cifar-10-binary", "cifar-10-batches-bin", _BINARY_BATCHES, "test_batch.bin", read_binary),
    ),
)

CIFAR100: Final = Cifar(
    Images(name="cifar100", shape=(3, 32, 32), train_counts=(500,) * 100, test_counts=(100,) * 100),
    (
        _layout("cifar-100-python", "cifar-100-python", ("train",), "test", partial(read_python, labels="fine_labels")),
        _layout(
            "cifar-100-binary", "cifar-100-binary", ("train.bin",), "test.bin", partial(read_binary, label_bytes=2)
        ),
    ),
)
