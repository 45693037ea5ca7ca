"""Arbitrary data files give the data or `DataCorrupt` (`DataNotFound`), within bounded memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import resource
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
from hypothesis import strategies as st

from federation.fuzzing import damaged, fuzz, json_values
from fedlalr.data.fetch import Fact
from fedlalr.data.sources import (
    DataCorrupt,
    DataNotFound,
    archive,
    cache,
    cifar,
    gutenberg,
    idx,
    text_readers,
    unpickle,
)
from fedlalr.data.sources.rawdata import Images


def allowed(read: Callable[..., object], *arguments: object, **options: object) -> object:
    try:
        return read(*arguments, **options)
    except (DataCorrupt, DataNotFound) as error:
        message = str(error)
    assert len(message) < 5000
    return None


def in_file(content: bytes, name: str, read: Callable[[Path], object]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        return allowed(read, path)


PIXELS = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
PICKLE = pickle.dumps({b"data": PIXELS, b"labels": [1, 2]}, protocol=2)
RECORDS = np.column_stack([[1, 2], PIXELS]).astype(np.uint8).tobytes()
IDX = idx.encode(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))


def fact(content: bytes) -> Fact:
    return Fact(len(content), "sha256", hashlib.sha256(content).hexdigest())


def tar(compression: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{compression}") as out:
        for name in ("a", "b"):
            member = tarfile.TarInfo(f"folder/{name}")
            member.size = 100
            out.addfile(member, io.BytesIO(b"x" * 100))
    return stream.getvalue()


SAFETENSORS = safetensors.numpy.save({"inputs": np.zeros(3, np.uint8)}, metadata={"format": "fedlalr-data-1"})


@fuzz("data files", content=st.binary(max_size=100) | damaged(IDX))
def test_any_bytes_are_an_idx_file_or_corrupt(content):
    """Its checksum decides before it is read, so only the original is read."""
    data = idx.IdxSet(Images("mnist", (1, 2, 2), (3,), (3,)), dict.fromkeys(idx.FILES.values(), fact(IDX)))
    found = allowed(data.decode, dict.fromkeys(idx.FILES.values(), ("a file", content)))
    assert (found is not None) == (content == IDX)
    return found is not None


@fuzz("data files", content=st.binary(max_size=100) | damaged(gzip.compress(IDX * 20)))
def test_any_bytes_are_a_gzip_file_or_corrupt(content):
    plain = allowed(archive.gunzip, content, "a file", limit=1000)
    assert plain is None or len(plain) <= 1000
    return plain is not None


@fuzz("data files", content=st.binary(max_size=100) | damaged(PICKLE))
def test_any_bytes_are_a_pickle_of_plain_arrays_or_corrupt(content):
    return allowed(unpickle.plain, content, "a file") is not None


def read_cifar(content: bytes, whole: bytes, decode: Callable[[bytes, str], cifar.LabelledImages]) -> bool:
    """Whether a file is read. Its checksum decides before it is read, so only the original is."""
    facts = dict.fromkeys(("train", "test"), fact(whole))
    layout = cifar.RecordLayout("a.tar.gz", "a", ("train",), "test", facts, decode)
    found = allowed(cifar.decode, layout, dict.fromkeys(("train", "test"), ("a file", content)))
    assert (found is not None) == (content == whole)
    return found is not None


@fuzz("data files", content=st.binary(max_size=100) | damaged(PICKLE))
def test_any_bytes_are_a_pickle_of_cifar_or_corrupt(content):
    return read_cifar(content, PICKLE, cifar.read_python)


@fuzz("data files", content=st.binary(max_size=100) | damaged(RECORDS))
def test_any_bytes_are_a_binary_file_of_cifar_or_corrupt(content):
    return read_cifar(content, RECORDS, cifar.read_binary)


@fuzz("data files", content=st.binary(max_size=100) | damaged(tar("")))
def test_any_bytes_are_an_archive_or_corrupt(content):
    return allowed(archive.from_tar_stream, io.BytesIO(content), ["a", "b"], "a package") is not None


@fuzz("data files", content=st.binary(max_size=100) | damaged(SAFETENSORS))
def test_any_bytes_are_a_cached_data_set_or_corrupt(content):
    return in_file(content, "mnist.safetensors", lambda path: cache.load(path, "mnist")) is not None


@fuzz(
    "data files",
    header=st.dictionaries(st.sampled_from(["format", "name", "origin", "sha256", "x"]), st.text(max_size=10)),
)
def test_any_header_of_a_cached_data_set_is_read_or_corrupt(header):
    arrays = {"inputs": np.zeros(3, np.uint8)}
    known = {"format": "fedlalr-data-1", "name": "mnist", "sha256": cache._digest(arrays)}
    content = safetensors.numpy.save(arrays, metadata={**header, **{k: known[k] for k in known if k not in header}})
    return in_file(content, "mnist.safetensors", lambda path: cache.load(path, "mnist")) is not None


WINDOW = "a" * 80
leaf_users = st.dictionaries(
    st.text(max_size=5),
    st.fixed_dictionaries({"x": st.just([WINDOW]) | json_values, "y": st.just(["b"]) | json_values}) | json_values,
    max_size=3,
)


@fuzz("data files", users=leaf_users, listed=st.none() | json_values, rest=json_values)
def test_any_json_is_a_file_of_leaf_or_corrupt(users, listed, rest):
    whole = {"users": list(users) if listed is None else listed, "user_data": users}
    found = [
        in_file(json.dumps(content).encode(), "all.json", lambda path: text_readers.from_leaf([path]))
        for content in (whole, rest, {"users": rest, "user_data": rest})
    ]
    return found[0] is not None


@fuzz(
    "data files",
    content=st.binary(max_size=100)
    | damaged(json.dumps({"users": ["a"], "user_data": {"a": {"x": [WINDOW], "y": ["b"]}}}).encode()),
)
def test_any_bytes_are_a_file_of_leaf_or_corrupt(content):
    return in_file(content, "all.json", lambda path: text_readers.from_leaf([path])) is not None


@fuzz(
    "data files",
    text=st.text(max_size=300)
    | st.lists(
        st.sampled_from(
            ["ACT I", "SCENE I. A room", "HAM.", "  HAMLET. To be", "", "[Exit", "Enter KING]", "THE END", "\x00", "é"]
        ),
        max_size=30,
    ).map("\n".join),
)
def test_any_text_is_a_play_or_corrupt(text):
    allowed(gutenberg.speeches, text, "a play")
    content = text.encode("utf-8", "surrogatepass")
    return in_file(content, "play.txt", lambda path: text_readers.from_folder(path.parent)) is not None


def test_a_deeply_nested_file_of_leaf_is_corrupt():
    assert in_file(b'{"users": ' + b"[" * 200_000, "all.json", lambda path: text_readers.from_leaf([path])) is None


def test_a_gzip_bomb_is_corrupt_before_memory_is_taken():
    bomb = gzip.compress(bytes(100 << 20), compresslevel=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert allowed(archive.gunzip, bomb, "a file", limit=1000) is None
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 50 << 20
