"""Files of tensors: any types and shapes come back, also through the library that defines the format."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from fedlalr.federation.storage.tensor_files import read_tensors, write_tensors

TYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    tensor = numbers.to(draw(st.sampled_from(TYPES)))
    return tensor.mT if len(shape) > 1 and draw(st.booleans()) else tensor  # not contiguous


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=5), tensors(), max_size=6))
def test_any_tensors_come_back(given_: dict[str, Tensor]) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "state.safetensors"
        seal = write_tensors(file, given_)
        content = file.read_bytes()
        assert (seal.bytes, seal.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        for found in (read_tensors(file, seal), load_file(file)):
            assert found.keys() == given_.keys()
            for name, tensor in given_.items():
                assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(found[name].double(), tensor.double())


def test_every_tensor_begins_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {f"{dtype}": torch.ones(3, dtype=dtype) for dtype in reversed(TYPES)})
    content = (tmp_path / "file").read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    for dtype in TYPES:
        entry = json.loads(content[8:begin])[str(dtype)]
        assert (begin + entry["data_offsets"][0]) % dtype.itemsize == 0


def test_tensors_that_share_memory_are_written_each(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    read = read_tensors(tmp_path / "file", write_tensors(tmp_path / "file", {"a": whole, "b": whole, "c": whole[2:4]}))
    assert torch.equal(read["a"], read["b"])
    assert read["c"].tolist() == [2.0, 3.0]
