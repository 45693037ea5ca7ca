"""CIFAR in its original formats, on small files of the same form, whole and damaged."""

import dataclasses
import gzip
import hashlib
import io
import json
import pickle
import tarfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from fedlalr.data.fetch import DataCorrupt, DataNotFound, Fact
from fedlalr.data.sources import cifar
from fedlalr.data.sources.cifar import CIFAR10, CIFAR100, Cifar, LabelledImages
from fedlalr.data.sources.rawdata import Images
from fedlalr.data.sources.registry import image_files
from fedlalr.data.sources.source import obtain


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes what Python 2 wrote: byte strings, protocol 2, NumPy's old module names."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def save_text(self, text: str | bytes) -> None:
        raw = text if isinstance(text, bytes) else text.encode("latin1")
        self.write(b"U" + bytes([len(raw)]) + raw if len(raw) < 256 else b"T" + len(raw).to_bytes(4, "little") + raw)
        self.memoize(text)

    dispatch[bytes] = dispatch[str] = save_text

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if getattr(obj, "__name__", "") == "_reconstruct":
            self.write(b"cnumpy.core.multiarray\n_reconstruct\n")
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def python2(content: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(content)
    return file.getvalue()


def small(data: Cifar, rows_per_class: int = 2) -> Cifar:
    """The same data set with few images, and the checksums of the files that `parts_of` gives."""
    counts = (rows_per_class,) * data.images.classes, (1,) * data.images.classes
    small = dataclasses.replace(data, images=Images(data.images.name, (3, 32, 32), *counts))
    return with_checksums(small, parts_of(small))


def parts_of(data: Cifar) -> list[LabelledImages]:
    """Random images, with every class as often as the data set says, cut into files."""
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(data.images.classes), data.images.train_counts)).astype(np.uint8)
    parts = [*np.split(labels, len(data.layouts[0].train)), rng.permutation(data.images.classes).astype(np.uint8)]
    return [LabelledImages(rng.integers(0, 256, (len(p), 3, 32, 32), dtype=np.uint8), p) for p in parts]


def content(data: Cifar, part: LabelledImages, layout: int) -> bytes:
    """A file in one of the two formats (0: python, 1: binary)."""
    pixels, coarse = part.images.reshape(len(part.labels), -1), part.labels // 5
    if layout:
        return np.column_stack([coarse, part.labels, pixels]).tobytes() if data.images.classes > 10 else part.records()
    labels = {"fine_labels": part.labels.tolist(), "coarse_labels": coarse.tolist()}
    labels = labels if data.images.classes > 10 else {"labels": part.labels.tolist()}
    return python2({"batch_label": "a batch", "data": pixels, **labels})


def write(folder: Path, data: Cifar, parts: list[LabelledImages], layout: int) -> Path:
    """The files of one of the two formats (0: python, 1: binary), unpacked."""
    form = data.layouts[layout]
    place = folder / form.folder
    place.mkdir(parents=True, exist_ok=True)
    for name, part in zip(form.files, parts, strict=True):
        (place / name).write_bytes(content(data, part, layout))
    return place


def fact(content: bytes) -> Fact:
    return Fact(len(content), "md5", hashlib.md5(content).hexdigest())


def with_checksums(data: Cifar, parts: list[LabelledImages]) -> Cifar:
    """Let the files with these parts be the right ones."""
    layouts = []
    for layout, form in enumerate(data.layouts):
        files = {name: content(data, part, layout) for name, part in zip(form.files, parts, strict=True)}
        facts = {name: fact(file) for name, file in files.items()} | {form.archive: fact(packed(form.folder, files))}
        layouts.append(dataclasses.replace(form, facts=facts))
    return dataclasses.replace(data, layouts=tuple(layouts))


def packed(folder: str, files: dict[str, bytes]) -> bytes:
    """An archive of files in a folder."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, file in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(file)
            tar.addfile(member, io.BytesIO(file))
    return gzip.compress(plain.getvalue(), mtime=0)


def pack(place: Path, archive: Path, data: Cifar, layout: int) -> Path:
    files = {name: (place / name).read_bytes() for name in data.layouts[layout].files}
    archive.write_bytes(packed(place.name, files))
    return archive


@pytest.fixture(params=[CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def data(request: pytest.FixtureRequest) -> Cifar:
    return small(request.param)


@pytest.mark.parametrize("in_archive", [False, True], ids=["folder", "archive"])
@pytest.mark.parametrize("layout", [0, 1], ids=["python", "binary"])
def test_every_original_format_gives_the_same_images(
    data: Cifar, layout: int, in_archive: bool, tmp_path: Path
) -> None:
    parts = parts_of(data)
    place = write(tmp_path / "unpacked", data, parts, layout)
    folder = tmp_path / "unpacked"
    if in_archive:
        folder = tmp_path
        pack(place, tmp_path / data.layouts[layout].archive, data, layout)
    found = obtain(image_files(data, "", ()), folder=folder)
    assert np.array_equal(found.arrays["inputs"], np.concatenate([part.images for part in parts[:-1]]))
    assert np.array_equal(found.arrays["targets"], np.concatenate([part.labels for part in parts[:-1]]))
    assert np.array_equal(found.arrays["test_inputs"], parts[-1].images)
    raw = image_files(data, "", ()).build(found.arrays, found.where)
    assert raw.inputs.shape == (sum(data.images.train_counts), 3, 32, 32)
    assert raw.classes == data.images.classes


def test_the_archive_itself_may_be_given(data: Cifar, tmp_path: Path) -> None:
    archive = pack(write(tmp_path, data, parts_of(data), 0), tmp_path / data.layouts[0].archive, data, 0)
    assert len(obtain(image_files(data, "", ()), folder=archive).arrays["targets"]) == sum(data.images.train_counts)


def test_python_3_pickles_are_read_too(tmp_path: Path) -> None:
    part = parts_of(small(CIFAR10))[0]
    content = pickle.dumps({"data": part.images.reshape(-1, 3072), "labels": part.labels.tolist()}, protocol=2)
    assert np.array_equal(cifar.read_python(content, "a file").images, part.images)


@pytest.mark.parametrize("layout", [0, 1], ids=["python", "binary"])
def test_a_truncated_file_is_refused_by_name(data: Cifar, layout: int, tmp_path: Path) -> None:
    place = write(tmp_path, data, parts_of(data), layout)
    name = data.layouts[layout].train[-1]
    (place / name).write_bytes((place / name).read_bytes()[:-100])
    with pytest.raises(DataCorrupt, match=str(place / name)):
        data.from_folder(tmp_path)


@pytest.mark.parametrize("layout", [0, 1], ids=["python", "binary"])
def test_swapped_labels_are_refused_by_name(data: Cifar, layout: int, tmp_path: Path) -> None:
    """Every class keeps its count, so that only the checksum can tell."""
    parts = parts_of(data)
    place = write(tmp_path, data, parts, layout)
    data.from_folder(tmp_path)
    labels = parts[0].labels
    other = int(np.flatnonzero(labels != labels[0])[0])
    labels[[0, other]] = labels[[other, 0]]
    write(tmp_path, data, parts, layout)
    with pytest.raises(DataCorrupt, match=f"{place / data.layouts[layout].train[0]}.*checksum"):
        data.from_folder(tmp_path)


def test_wrong_class_counts_are_refused(tmp_path: Path) -> None:
    data = small(CIFAR10)
    parts = parts_of(data)
    parts[0].labels[:] = 3
    data = with_checksums(data, parts)
    write(tmp_path, data, parts, 1)
    with pytest.raises(DataCorrupt, match="labels of the training part of cifar10"):
        obtain(image_files(data, "", ()), folder=tmp_path)


def test_a_label_out_of_range_is_refused(tmp_path: Path) -> None:
    data = small(CIFAR10)
    parts = parts_of(data)
    parts[2].labels[1] = 10
    data = with_checksums(data, parts)
    write(tmp_path, data, parts, 0)
    with pytest.raises(DataCorrupt, match="labels of the training part of cifar10"):
        obtain(image_files(data, "", ()), folder=tmp_path)


def test_a_missing_file_is_refused_by_name(data: Cifar, tmp_path: Path) -> None:
    place = write(tmp_path, data, parts_of(data), 0)
    (place / data.layouts[0].test).unlink()
    with pytest.raises(DataCorrupt, match=f"incomplete: missing {data.layouts[0].test}"):
        data.from_folder(tmp_path)


@pytest.mark.parametrize("keep", [10, 0.5, -8])
def test_a_truncated_archive_is_refused_by_name(data: Cifar, keep: float, tmp_path: Path) -> None:
    archive = pack(write(tmp_path / "x", data, parts_of(data), 1), tmp_path / data.layouts[1].archive, data, 1)
    content = archive.read_bytes()
    archive.write_bytes(content[: int(keep * len(content))] if isinstance(keep, float) else content[: int(keep)])
    with pytest.raises(DataCorrupt, match=str(archive)):
        data.from_folder(tmp_path)


def test_the_published_archives_are_recognised_by_size_and_checksum(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"not the archive")
    with pytest.raises(DataCorrupt, match=r"cifar-10-python.tar.gz has 15 bytes, but 170,498,071 are expected"):
        CIFAR10.from_folder(tmp_path)


def test_a_wrong_file_with_a_known_name_is_never_unpickled(tmp_path: Path) -> None:
    place = write(tmp_path, small(CIFAR10), parts_of(small(CIFAR10)), 0)
    with pytest.raises(DataCorrupt, match=f"{place / 'data_batch_1'} is wrong: its md5 checksum"):
        CIFAR10.from_folder(tmp_path)


def sheets(parts: list[LabelledImages], names: list[str]) -> dict[str, bytes]:
    """The files of the npm package."""
    contents: dict[str, bytes] = {}
    for name, part in zip(names, parts, strict=True):
        file = io.BytesIO()
        Image.fromarray(part.images.transpose(0, 2, 3, 1).reshape(len(part.labels), 1024, 3)).save(file, "PNG")
        contents[f"{name}.png"] = file.getvalue()
    contents["train_lables.json"] = json.dumps(np.concatenate([p.labels for p in parts[:-1]]).tolist()).encode()
    contents["test_lables.json"] = json.dumps(parts[-1].labels.tolist()).encode()
    return contents


def test_png_sheets_hold_the_images_bit_for_bit() -> None:
    parts = parts_of(small(CIFAR10))
    found = cifar.read_sheets(sheets(parts, [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]))
    wanted = cifar.join(parts[:-1], parts[-1])
    for name, array in wanted.items():
        assert np.array_equal(found[name], array)


def test_a_given_folder_without_the_data_says_what_it_must_hold(tmp_path: Path) -> None:
    with pytest.raises(DataNotFound, match=r"does not contain cifar100; it must contain cifar-100-python.tar.gz"):
        obtain(image_files(CIFAR100, "", ()), folder=tmp_path)
    with pytest.raises(DataNotFound, match="does not exist"):
        obtain(image_files(CIFAR100, "", ()), folder=tmp_path / "nowhere")
