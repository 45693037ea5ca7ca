"""MNIST's file format, on small files, whole and damaged."""

import dataclasses
import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from fedlalr.data.fetch import DataCorrupt, Fact
from fedlalr.data.sources.idx import FASHION, FILES, MNIST, IdxSet
from fedlalr.data.sources.rawdata import Images
from fedlalr.data.sources.registry import image_files
from fedlalr.data.sources.source import obtain


def idx(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def small_files() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    files = {}
    for part, count in (("", 20), ("test_", 10)):
        files[FILES[f"{part}inputs"]] = idx(rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[FILES[f"{part}targets"]] = idx(rng.permutation(np.arange(count, dtype=np.uint8) % 10))
    return files


@pytest.fixture
def files() -> dict[str, bytes]:
    return small_files()


@pytest.fixture
def data(files: dict[str, bytes]) -> IdxSet:
    facts = {name: Fact(len(content), "sha256", hashlib.sha256(content).hexdigest()) for name, content in files.items()}
    return IdxSet(Images("mnist", (1, 28, 28), (2,) * 10, (1,) * 10), facts)


def put(folder: Path, files: dict[str, bytes], packed: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
def test_the_files_are_found_in_the_usual_folders(
    data: IdxSet, files: dict[str, bytes], packed: bool, below: str, tmp_path: Path
) -> None:
    (tmp_path / below).mkdir(parents=True, exist_ok=True)
    put(tmp_path / below, files, packed)
    found = obtain(image_files(data, "", (), subfolders=("mnist", "MNIST/raw")), folder=tmp_path)
    assert found.where == str(tmp_path / below)
    assert found.arrays["inputs"].shape == (20, 1, 28, 28)
    assert found.arrays["inputs"].tobytes() == files["train-images-idx3-ubyte"][16:]
    assert found.arrays["test_targets"].tobytes() == files["t10k-labels-idx1-ubyte"][8:]


@pytest.mark.parametrize("name", list(FILES.values()))
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_truncated_file_is_refused_by_name(
    data: IdxSet, files: dict[str, bytes], name: str, packed: bool, tmp_path: Path
) -> None:
    put(tmp_path, files, packed)
    path = tmp_path / (f"{name}.gz" if packed else name)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataCorrupt, match=f"{path} (is truncated|has .* bytes, but .* are expected; it is truncated)"):
        data.from_folder(tmp_path)


def test_a_wrong_magic_number_is_refused_by_name(data: IdxSet, files: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path, files)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(b"\x00\x00\x08\x01" + path.read_bytes()[4:])
    with pytest.raises(DataCorrupt, match=f"{path} is wrong: its sha256 checksum"):
        data.from_folder(tmp_path)


def test_images_in_the_place_of_labels_are_refused(data: IdxSet, files: dict[str, bytes], tmp_path: Path) -> None:
    images, labels = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
    put(tmp_path, files | {images: files[labels], labels: files[images]})
    with pytest.raises(DataCorrupt, match=f"{tmp_path / images} has 28 bytes, but 15,696 are expected"):
        data.from_folder(tmp_path)


def test_swapped_labels_are_refused_by_name(data: IdxSet, files: dict[str, bytes], tmp_path: Path) -> None:
    name = "train-labels-idx1-ubyte"
    labels = bytearray(files[name])
    other = next(i for i in range(9, len(labels)) if labels[i] != labels[8])
    labels[8], labels[other] = labels[other], labels[8]
    put(tmp_path, files | {name: bytes(labels)})
    with pytest.raises(DataCorrupt, match=f"{tmp_path / name} is wrong: its sha256 checksum"):
        data.from_folder(tmp_path)


def test_fashion_is_not_taken_for_mnist(files: dict[str, bytes], tmp_path: Path) -> None:
    """The files have the same names; the checksum distinguishes them."""
    assert set(MNIST.facts) == set(FASHION.facts)
    put(tmp_path, files)
    with pytest.raises(DataCorrupt, match=str(tmp_path)):
        MNIST.from_folder(tmp_path)


def test_a_missing_file_is_refused_by_name(data: IdxSet, files: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path, files)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataCorrupt, match="incomplete: missing t10k-labels-idx1-ubyte"):
        data.from_folder(tmp_path)


def test_a_gzip_bomb_is_refused_before_it_takes_memory(data: IdxSet, files: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path, files, packed=True)
    bomb = tmp_path / "t10k-labels-idx1-ubyte.gz"
    bomb.write_bytes(gzip.compress(bytes(50_000_000)))
    with pytest.raises(DataCorrupt, match=f"{bomb} unpacks to more than the expected 18 bytes"):
        data.from_folder(tmp_path)


def test_wrong_class_counts_are_refused(data: IdxSet, files: dict[str, bytes], tmp_path: Path) -> None:
    put(tmp_path, files)
    uneven = dataclasses.replace(data, images=dataclasses.replace(data.images, train_counts=(3, 1, *(2,) * 8)))
    with pytest.raises(DataCorrupt, match="2 images are of class 0, but 3 are expected"):
        obtain(image_files(uneven, "", ()), folder=tmp_path)
