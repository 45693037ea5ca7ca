"""An untrusted pickle can do nothing but contain plain arrays."""

import os
import pickle
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlalr.data.fetch import DataCorrupt
from fedlalr.data.sources.unpickle import plain


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call

    def __repr__(self) -> str:
        return f"{self.call[0].__name__}{self.call[1]}"


def test_plain_content_is_read() -> None:
    content = {"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2], "name": "x", "raw": b"y", "n": 3}
    for protocol in (2, 3, 4):
        found = plain(pickle.dumps(content, protocol=protocol), "a file")
        assert np.array_equal(found.pop("data"), content["data"])
        assert found == {"labels": [1, 2], "name": "x", "raw": b"y", "n": 3}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_call_is_refused_and_not_made(protocol: int, tmp_path: Path) -> None:
    target = tmp_path / "made by the pickle"
    content = pickle.dumps({"data": Calls(os.mkdir, str(target))}, protocol=protocol)
    with pytest.raises(DataCorrupt, match=r"evil.bin is rejected: it names posix.mkdir"):
        plain(content, "evil.bin")
    assert not target.exists()
    pickle.loads(content)
    assert target.exists()


@pytest.mark.parametrize(
    "evil",
    [
        Calls(eval, "1"),
        Calls(getattr, "x", "upper"),
        Calls(np.load, "file.npy"),
        Calls(np.ndarray, (1 << 40,)),
        Calls(np.zeros, (1 << 40,)),
        np.array([1.5, 2.5]),
        np.array([{}], dtype=object),
        np.zeros(3, dtype="u1,u2"),
        np.asfortranarray(np.zeros((2, 3), np.uint8)),
        np.dtype("u1"),
        np.ndarray,
        [[1], [2]],
        (1, 2),
        {"deeper": 1},
        1.5,
        {1},
        None,
    ],
    ids=repr,
)
def test_anything_but_plain_arrays_lists_texts_and_numbers_is_refused(evil: Any) -> None:
    with pytest.raises(DataCorrupt, match=r"evil.bin is"):
        plain(pickle.dumps({"data": evil}, protocol=2), "evil.bin")


def test_an_array_that_claims_more_than_it_holds_is_refused() -> None:
    content = pickle.dumps({"data": np.zeros((2, 3), np.uint8)}, protocol=2)
    lying = content.replace(b"K\x02K\x03\x86", b"J\xff\xff\xff\x7fK\x03\x86")
    assert lying != content
    with pytest.raises(DataCorrupt, match="does not have 6 bytes"):
        plain(lying, "a file")


def test_an_unfinished_array_is_refused() -> None:
    half = b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87Rs."
    with pytest.raises(DataCorrupt, match="contains a Array"):
        plain(half, "a file")


def test_other_objects_at_the_top_or_as_keys_are_refused() -> None:
    with pytest.raises(DataCorrupt, match="a list, but CIFAR's files contain a dict"):
        plain(pickle.dumps([1]), "a file")
    with pytest.raises(DataCorrupt, match="uses a int as a key"):
        plain(pickle.dumps({1: 2}), "a file")


def test_a_reference_outside_the_file_is_refused() -> None:
    with pytest.raises(DataCorrupt, match="outside the file"):
        plain(b"\x80\x02}U\x04dataPsomething\ns.", "a file")


def test_nested_copies_do_not_take_exponential_memory() -> None:
    """Ten lists that each contain the previous one a thousand times would expand to 10^30 entries."""
    nested: list[Any] = [1]
    for _ in range(10):
        nested = [nested] * 1000
    with pytest.raises(DataCorrupt, match="contains a list"):
        plain(pickle.dumps({"data": nested}), "a file")


@pytest.mark.parametrize("bomb", [b"}r\xff\xff\xff\x3f.", b"}p1073741823\n."], ids=["binary", "text"])
def test_a_few_bytes_do_not_take_the_memory_of_a_billion_objects(bomb: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataCorrupt, match="has a memo index of 1,073,741,823"):
        plain(bomb, "a file")
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 50 << 20


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_noise_is_refused_by_name(noise: bytes) -> None:
    with pytest.raises(DataCorrupt, match=r"noise.bin is"):
        plain(noise, "noise.bin")


@settings(deadline=None, max_examples=200)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_pickle_is_read_as_plain_or_refused(place: int, value: int) -> None:
    content = bytearray(pickle.dumps({"data": np.zeros((2, 3), np.uint8), "labels": [1, 2]}, protocol=2))
    content[place % len(content)] = value
    try:
        found = plain(bytes(content), "a file")
    except DataCorrupt:
        return
    assert all(isinstance(item, np.ndarray | list | int | str | bytes) for item in found.values())
