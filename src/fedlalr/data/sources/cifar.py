"""CIFAR-10 and CIFAR-100: the original python and binary archives, packed or unpacked, and PNG sheets of CIFAR-10."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedlalr.data.fetch import DataCorrupt, Fact
from fedlalr.data.sources import archive, unpickle
from fedlalr.data.sources.rawdata import Arrays, Images

_PIXELS: Final = 3 * 32 * 32


@dataclass(frozen=True)
class LabelledImages:
    """The content of one file: images `[n, 3, 32, 32]` and labels `[n]`, with the coarse labels of CIFAR-100."""

    images: NDArray[np.uint8]
    labels: NDArray[np.uint8]
    coarse: NDArray[np.uint8] | None = None

    def records(self) -> bytes:
        """The content in the original binary format, so that its checksum does not depend on how it was stored."""
        labels = [self.labels] if self.coarse is None else [self.coarse, self.labels]
        return np.column_stack([*labels, self.images.reshape(len(self.images), -1)]).tobytes()


@dataclass(frozen=True)
class RecordLayout:
    """One original format: the archive, the folder in it, and the files of the training and the test part."""

    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    facts: Mapping[str, Fact]
    decode: Callable[[bytes, str, int], LabelledImages] = field(repr=False)

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test)


@dataclass(frozen=True)
class Cifar:
    """A CIFAR data set: its expected shape and class counts, and its original formats."""

    images: Images
    coarse_classes: int
    layouts: tuple[RecordLayout, ...]

    @property
    def formats(self) -> str:
        """What a folder must contain."""
        return " or ".join(f"{layout.archive} (or the folder {layout.folder} from it)" for layout in self.layouts)

    def holds(self, folder: Path) -> bool:
        """Whether a path is a folder with one of the original formats, or the archive of one."""
        return any(_located(layout, folder) is not None for layout in self.layouts)

    def from_folder(self, folder: Path) -> Arrays:
        """Read the first original format found in a folder."""
        for layout in self.layouts:
            place = _located(layout, folder)
            if place is not None:
                return self.decode(layout, _contents(layout, place))
        raise DataCorrupt(f"{folder} has no files of {self.images.name}")

    def decode(self, layout: RecordLayout, contents: Mapping[str, tuple[str, bytes]]) -> Arrays:
        """Arrays from (where, bytes) of every file. Checksums are verified before any byte is interpreted."""
        parts: list[LabelledImages] = []
        for name in layout.files:
            where, content = contents[name]
            if name in layout.facts:
                layout.facts[name].check(content, where)
            part = layout.decode(content, where, self.coarse_classes)
            self._check_part(part, where)
            parts.append(part)
        return join(parts[:-1], parts[-1])

    def _check_part(self, part: LabelledImages, where: str) -> None:
        """Check that labels are in range, and for CIFAR-100 that every class belongs to one coarse class."""
        if len(part.labels) and part.labels.max() >= self.images.classes:
            raise DataCorrupt(
                f"{where} has the label {part.labels.max()}, but labels range from 0 to {self.images.classes - 1}"
            )
        if part.coarse is None:
            return
        pairs = np.unique(np.column_stack([part.labels, part.coarse]), axis=0)
        labels, times = np.unique(pairs[:, 0], return_counts=True)
        if times.max(initial=1) > 1:
            raise DataCorrupt(
                f"{where} assigns class {labels[times > 1][0]} to several coarse classes; its labels are wrong"
            )


def join(train: list[LabelledImages], test: LabelledImages) -> Arrays:
    """The parts joined to the arrays of a data set."""
    return {
        "inputs": np.concatenate([part.images for part in train]),
        "targets": np.concatenate([part.labels for part in train]),
        "test_inputs": test.images,
        "test_targets": test.labels,
    }


def read_python(content: bytes, where: str, coarse_classes: int) -> LabelledImages:
    """A file of the python archive: a pickled dict of pixels and labels."""
    found = unpickle.plain(content, where)
    pixels = found.get("data")
    if not isinstance(pixels, np.ndarray) or pixels.ndim != 2 or pixels.shape[1] != _PIXELS:
        raise DataCorrupt(f"{where} is not a pickle of CIFAR: it has no array 'data' with {_PIXELS} values per row")
    names = ("fine_labels", "coarse_labels") if coarse_classes else ("labels",)
    labels = [_labels(found, name, len(pixels), where) for name in names]
    return LabelledImages(pixels.reshape(-1, 3, 32, 32), *labels)


def read_binary(content: bytes, where: str, coarse_classes: int) -> LabelledImages:
    """A file of the binary archive: rows of one label (CIFAR-100: the coarse and the fine one) and 3,072 pixels."""
    width = _PIXELS + (2 if coarse_classes else 1)
    if not content or len(content) % width:
        raise DataCorrupt(
            f"{where} has {len(content):,} bytes, not a multiple of the row size {width}; it is truncated"
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, width)
    images = np.ascontiguousarray(rows[:, width - _PIXELS :]).reshape(-1, 3, 32, 32)
    return LabelledImages(images, rows[:, width - _PIXELS - 1].copy(), rows[:, 0].copy() if coarse_classes else None)


def read_sheets(
    contents: Mapping[str, bytes], where: str, train: tuple[str, ...], test: str
) -> tuple[list[LabelledImages], LabelledImages]:
    """The npm package: one PNG per file with one image per row of pixels, in reading order; labels as JSON."""
    images = [_sheet(contents[f"{name}.png"], f"{name}.png of {where}") for name in (*train, test)]
    parts: list[LabelledImages] = []
    for group, file in ((images[:-1], "train_lables.json"), (images[-1:], "test_lables.json")):
        labels = _json_labels(contents[file], sum(map(len, group)), f"{file} of {where}")
        ends = np.cumsum([len(sheet) for sheet in group])[:-1]
        parts += [LabelledImages(sheet, part) for sheet, part in zip(group, np.split(labels, ends), strict=True)]
    return parts[:-1], parts[-1]


def _sheet(content: bytes, where: str) -> NDArray[np.uint8]:
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as sheet:
            if sheet.width != 32 * 32 or sheet.mode != "RGB":
                raise DataCorrupt(f"{where} is {sheet.width} pixels wide in mode {sheet.mode}, not 1024 in RGB")
            pixels = np.asarray(sheet)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, DataCorrupt):
            raise
        raise DataCorrupt(f"{where} is not a complete PNG ({error})") from error
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def _json_labels(content: bytes, count: int, where: str) -> NDArray[np.uint8]:
    try:
        labels = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataCorrupt(f"{where} is not JSON ({error})") from error
    return _as_labels(labels, count, where)


def _labels(found: Mapping[str, Any], name: str, count: int, where: str) -> NDArray[np.uint8]:
    return _as_labels(found.get(name), count, f"'{name}' in {where}")


def _as_labels(labels: object, count: int, where: str) -> NDArray[np.uint8]:
    if not isinstance(labels, list) or not all(type(label) is int and 0 <= label < 256 for label in labels):
        raise DataCorrupt(f"{where} is not a list of labels")
    if len(labels) != count:
        raise DataCorrupt(f"{where} has {len(labels):,} labels for {count:,} images")
    return np.array(labels, dtype=np.uint8)


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
    if layout.archive in layout.facts:
        layout.facts[layout.archive].check_file(place)
    found = archive.from_tar(place, layout.files)
    return {name: (f"{place}: {name}", content) for name, content in found.items()}
