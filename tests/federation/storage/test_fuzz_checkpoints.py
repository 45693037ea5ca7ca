"""Arbitrary checkpoint files are read correctly or raise the documented error; a run resumes or says why it cannot."""

from __future__ import annotations

import hashlib
import json
import tempfile
from functools import cache as once
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import fedlalr as fl
from conftest import make_clients, make_model
from federation.fuzzing import SLOW, damaged, fuzz, json_values
from fedlalr.algorithms.slots import Slots
from fedlalr.data.population import as_clients
from fedlalr.federation.session import initial_state
from fedlalr.federation.storage.checkpoint import CheckpointError, load_checkpoint, sealed
from fedlalr.federation.storage.journal import RunDirectoryError
from fedlalr.training.interfaces import Training
from fedlalr.training.layout import Layout

KEPT_FILE = "kept-000001.safetensors"


@once
def a_checkpoint() -> tuple[bytes, bytes, bytes, Any]:
    """A real checkpoint: description, tensors, kept slots, and a state of the same form."""
    folder = Path(tempfile.mkdtemp())
    algorithm = fl.SCAFFOLD(0.1)
    fl.run(
        make_model(), make_clients(), algorithm, rounds=1, local=fl.Steps(1), batch_size=4, run_dir=folder,
        engine="reference",
    )  # fmt: skip
    model = make_model()
    training = Training(
        model=model, layout=Layout.of(model), clients=as_clients(make_clients()), algorithm=algorithm,
        loss=torch.nn.functional.cross_entropy, local=fl.Steps(1), device=torch.device("cpu"),
    )  # fmt: skip
    place = folder / "checkpoint" / "round-000001"
    files = (place / "checkpoint.json", place / "state.safetensors", place.parent / KEPT_FILE)
    return *(file.read_bytes() for file in files), initial_state(training)


def load_parts(description: bytes, tensors: bytes, kept: bytes) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "round-000001"
        place.mkdir()
        (place / "checkpoint.json").write_bytes(description)
        (place / "state.safetensors").write_bytes(tensors)
        (Path(folder) / KEPT_FILE).write_bytes(kept)
        try:
            state = a_checkpoint()[3]
            load_checkpoint(place, state, Slots(c_i=state.slots.x))
        except CheckpointError:
            return False
        return True


def test_the_checkpoint_that_is_damaged_below_is_whole():
    assert load_parts(*a_checkpoint()[:3])


@fuzz("checkpoints", data=st.data())
def test_a_damaged_checkpoint_is_a_checkpoint_error(data):
    whole = a_checkpoint()[:3]
    which = data.draw(st.sets(st.integers(0, 2), min_size=1))
    parts = [data.draw(damaged(part)) if i in which else part for i, part in enumerate(whole)]
    if not load_parts(*parts):
        return False
    assert json.loads(parts[0]) == json.loads(whole[0])
    assert tuple(parts[1:]) == whole[1:]
    return True


def described(content: dict[str, Any], tensors: bytes) -> bytes:
    content = content | {"bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}
    return json.dumps(sealed(content)).encode()


@fuzz(
    "checkpoints",
    data=st.data(),
    changes=st.dictionaries(
        st.sampled_from(["round", "record", "offset", "facts", "choices", "versions", "format", "kept"]),
        json_values,
        max_size=3,
    ),
)
def test_a_forged_checkpoint_with_matching_hashes_is_a_checkpoint_or_an_error(data, changes):
    description, tensors, kept, _ = a_checkpoint()
    forged = data.draw(st.just(tensors) | damaged(tensors))
    forged_kept = data.draw(st.just(kept) | damaged(kept))
    content = json.loads(description)["content"]
    content["kept"][0] |= {"bytes": len(forged_kept), "sha256": hashlib.sha256(forged_kept).hexdigest()}
    if data.draw(st.booleans()):
        content["kept"][0][data.draw(st.sampled_from(["file", "clients", "bytes"]))] = data.draw(json_values)
    return load_parts(described(content | changes, forged), forged, forged_kept)


@fuzz(
    "checkpoints",
    content=st.binary(max_size=64)
    | st.builds(lambda n, rest: n.to_bytes(8, "little") + rest, st.integers(0, 2**64 - 1), st.binary(max_size=64)),
)
def test_any_bytes_in_the_place_of_tensors_are_an_error(content):
    description, _, kept, _ = a_checkpoint()
    taken = load_parts(described(json.loads(description)["content"], content), content, kept)
    assert not taken
    return taken


@once
def a_run() -> dict[str, bytes]:
    folder = Path(tempfile.mkdtemp())
    fl.run(
        make_model(), make_clients(), fl.FedAvg(0.1), rounds=2, local=fl.Steps(1), run_dir=folder, engine="reference"
    )
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@fuzz("run directories", SLOW, data=st.data())
def test_a_damaged_run_directory_resumes_or_says_why_not(data):
    files = dict(a_run())
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(files)))
        files[name] = data.draw(damaged(files[name]))
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        try:
            result = fl.run(
                make_model(), make_clients(), fl.FedAvg(0.1), rounds=2, local=fl.Steps(1), run_dir=folder, resume=True,
                engine="reference",
            )  # fmt: skip
        except RunDirectoryError:
            return False
        assert [record.round for record in result.history] == [1, 2]
        return True
