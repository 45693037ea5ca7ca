"""`result.save` and `fl.load`: everything comes back, and a file that cannot be trusted is rejected."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedlalr as fl
from conftest import make_clients
from fedlalr.federation.storage.checkpoint import sealed


class Net(nn.Module):
    """Frozen, tied and normalised layers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, width), nn.BatchNorm1d(width)
        self.second, self.last = nn.Linear(width, width), nn.Linear(width, 3)
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.second.weight
        self.first.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.first(inputs)).relu()
        return self.last(self.tied(self.second(hidden)))


@pytest.fixture(scope="module")
def result() -> fl.Result:
    torch.manual_seed(0)
    pairs = [(inputs.float(), targets) for inputs, targets in make_clients()]
    pairs[1][0][0, 0] = float("nan")  # so that a reply is rejected
    with pytest.warns(fl.RepliesRejected):
        return fl.run(
            Net(), pairs, fl.FedLALR(lr=0.05), rounds=3, engine="reference", test=pairs[0], batch_size=4,
            metrics={"half": lambda outputs, targets: 0.5, "none": lambda outputs, targets: float("nan")},
        )  # fmt: skip


@pytest.fixture
def saved(result: fl.Result, tmp_path: Path) -> Path:
    result.save(tmp_path / "result.safetensors")
    return tmp_path / "result.safetensors"


def test_everything_comes_back(result: fl.Result, saved: Path) -> None:
    torch.manual_seed(7)
    model = Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = fl.load(saved, model)
    assert repr(loaded) == repr(result)
    assert [record.to_json() for record in loaded.history] == [record.to_json() for record in result.history]
    assert loaded.info == result.info
    for slot, parts in result.state.items():
        assert list(loaded.state[slot]) == list(parts)
        assert all(torch.equal(loaded.state[slot][name], part) for name, part in parts.items())
    for name, value in result.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)
    assert loaded.model.tied.weight is loaded.model.second.weight
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    inputs = torch.randn(5, 4)
    assert torch.equal(loaded.model.eval()(inputs), result.model.eval()(inputs))


def test_the_precision_of_the_run_comes_back(tmp_path: Path) -> None:
    result = fl.run(nn.Linear(4, 3), make_clients(), fl.FedAvg(0.1), rounds=1, dtype="float64")
    result.save(tmp_path / "it")
    assert torch.equal(fl.load(tmp_path / "it", nn.Linear(4, 3)).model.weight, result.model.weight)


class Mixed(nn.Module):
    """Two layers of their own precision."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6, dtype=first), nn.BatchNorm1d(6, dtype=second)
        self.second = nn.Linear(6, 3, dtype=second)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.to(self.first.weight.dtype))
        return self.second(self.norm(hidden.to(self.second.weight.dtype)))


@pytest.mark.parametrize(("trainable", "own"), [(None, None), (("second.*",), None), (None, ("second.*",))])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.float64),
    ],
)
def test_models_in_half_and_in_mixed_precision_come_back(
    tmp_path: Path, first: torch.dtype, second: torch.dtype, trainable: tuple[str] | None, own: tuple[str] | None
) -> None:
    model = Mixed(first, second)
    result = fl.run(
        model, make_clients(), fl.FedLALR(lr=0.05), rounds=1, trainable=trainable, personal=own,
        buffers="average" if own is None else "local", test=make_clients()[0] if own is None else None,
    )  # fmt: skip
    result.save(tmp_path / "it")
    loaded = fl.load(tmp_path / "it", model)
    for mine, theirs in ((loaded.model.state_dict(), result.model.state_dict()), *_parts(loaded, result)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], part) and mine[name].dtype == part.dtype for name, part in theirs.items())


def _parts(loaded: fl.Result, result: fl.Result) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    assert loaded.state.keys() == result.state.keys()
    assert loaded.personal is not None
    assert result.personal is not None
    assert loaded.personal.keys() == result.personal.keys()
    slots = [(loaded.state[slot], part) for slot, part in result.state.items()]
    return slots + [(loaded.personal[client], part) for client, part in result.personal.items()]


def test_a_file_is_replaced_and_its_weights_are_readable_without_the_library(result: fl.Result, saved: Path) -> None:
    result.save(saved)
    assert torch.equal(load_file(saved)["model/last.weight"], result.model.last.weight)
    assert [file.name for file in saved.parent.iterdir()] == [saved.name]
    result.save(saved.parent / "new" / "folder" / "result.safetensors")
    assert (saved.parent / "new" / "folder" / "result.safetensors").stat().st_size == saved.stat().st_size


def parts_of(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def forge(file: Path, change: Any, header_change: Any = None) -> None:
    """Change the description of a file, with a correct hash."""
    header, data = parts_of(file)
    content = json.loads(header["__metadata__"]["fedlalr"])["content"]
    change(content)
    header["__metadata__"]["fedlalr"] = json.dumps(sealed(content))
    if header_change:
        header_change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_any_changed_byte_is_noticed(saved: Path) -> None:
    raw = saved.read_bytes()
    for place in [*range(0, 40), *range(40, len(raw), len(raw) // 40), len(raw) - 1]:
        saved.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        with pytest.raises(fl.CheckpointError, match=r"cannot be loaded"):
            fl.load(saved, Net())
    for end in (0, 4, 8, 100, len(raw) - 1):
        saved.write_bytes(raw[:end])
        with pytest.raises(fl.CheckpointError):
            fl.load(saved, Net())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(format=2), "it has format 2, and this version of fedlalr reads format 1"),
        (lambda content: content.update(dtype="__class__"), "its dtype is invalid"),
        (lambda content: content.update(history={}), "its history is invalid"),
        (lambda content: content.update(info=[]), "its info is invalid"),
        (lambda content: content["info"].update(rounds="3"), "rounds is '3'"),
        (lambda content: content["info"].update(secret=1), "secret"),
        (lambda content: content["info"].pop("engine"), "engine"),
        (lambda content: content["history"].pop(0), "the rounds from 1 on"),
        (lambda content: content["history"][0].update(loss="low"), "loss is 'low', not a number"),
        (lambda content: content["tensors"].clear(), r"it has no first\.weight"),
        (lambda content: content["tensors"].update({"model/first.weight": "0"}), "do not match the hashes"),
    ],
)
def test_a_forged_description_is_rejected(saved: Path, change: Any, message: str) -> None:
    forge(saved, change)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.load(saved, Net())


def test_a_file_of_another_model_is_rejected(saved: Path) -> None:
    for model, message in (
        (Net(width=5), r"its model/first\.weight is \(6, 4\), but this model's is \(5, 4\)"),
        (nn.Linear(4, 3), "it has no weight, which this model has"),
        (nn.Sequential(Net()), r"it has no 0\.first\.weight"),
    ):
        with pytest.raises(fl.CheckpointError, match=message):
            fl.load(saved, model)
    del (more := Net()).last
    with pytest.raises(fl.CheckpointError, match=r"it holds model/last\.(bias|weight), which this model does not have"):
        fl.load(saved, more)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "file"
    save_file({"weight": torch.zeros(3)}, file)
    with pytest.raises(fl.CheckpointError, match=r"not a file that result\.save wrote"):
        fl.load(file, Net())
    torch.save(Net(), file)
    with pytest.raises(fl.CheckpointError, match=r"not a file that result\.save wrote"):
        fl.load(file, Net())
    with pytest.raises(FileNotFoundError):
        fl.load(tmp_path / "absent", Net())
    with pytest.raises(fl.CheckpointError, match=r"it is a directory; .* with resume=True"):
        fl.load(tmp_path, Net())
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        fl.load(file, Net)


@pytest.mark.skipif(os.name != "posix", reason="pipes as POSIX has them")
def test_neither_a_pipe_nor_an_endless_file_is_read(saved: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(fl.CheckpointError, match="a pipe"):
        fl.load(tmp_path / "pipe", Net())

    def grow(header: dict[str, Any]) -> None:
        first = header["model/first.weight"]
        first["data_offsets"] = [0, 1 << 36]

    forge(saved, lambda content: None, grow)
    os.truncate(saved, 1 << 36)  # sparse
    with pytest.raises(fl.CheckpointError, match=r"it has 68,719,476,736 bytes, but such a file has at most"):
        fl.load(saved, Net())


@pytest.fixture
def personal() -> fl.Result:
    pairs = [(inputs.float(), targets) for inputs, targets in make_clients()]
    return fl.run(
        Net(), pairs, fl.FedLALR(lr=0.05), rounds=2, clients_per_round=2, personal=("last.*",), buffers="local",
        batch_size=4, drop_last=True, engine="reference",
    )  # fmt: skip


def test_the_models_of_the_clients_come_back(personal: fl.Result, tmp_path: Path) -> None:
    personal.save(tmp_path / "own")
    loaded = fl.load(tmp_path / "own", Net())
    assert loaded.personal is not None
    assert list(loaded.personal) == list(personal.personal or ())
    assert len(loaded.personal) > 1
    for client in range(personal.info.population):
        before, after = personal.client_model(client).state_dict(), loaded.client_model(client).state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
    own = [loaded.client_model(client).last.weight for client in loaded.personal]
    assert not torch.equal(own[0], own[1])


def test_models_on_other_machines_stay_there(personal: fl.Result, tmp_path: Path) -> None:
    dataclasses.replace(personal, personal=None).save(tmp_path / "own")
    loaded = fl.load(tmp_path / "own", Net())
    with pytest.raises(RuntimeError, match="on their own machines"):
        loaded.client_model(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(personal=[True]), "its personal is invalid"),
        (lambda content: content["personal"].pop(), r"its personal/last\.weight is"),
        (lambda content: content.update(personal=None), r"its personal/last\.weight is"),
    ],
)
def test_forged_clients_are_rejected(personal: fl.Result, tmp_path: Path, change: Any, message: str) -> None:
    personal.save(tmp_path / "own")
    forge(tmp_path / "own", change)
    with pytest.raises(fl.CheckpointError, match=message):
        fl.load(tmp_path / "own", Net())


def test_a_file_of_an_older_version_is_read(saved: Path) -> None:
    def older(content: dict[str, Any]) -> None:
        del content["personal"]
        del content["info"]["accuracy_every"]

    forge(saved, older)
    loaded = fl.load(saved, Net())
    assert (loaded.personal, loaded.info.accuracy_every) == ({}, 1)
