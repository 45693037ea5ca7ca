"""Hostile and broken input of every kind: only the documented errors come out, nothing hangs, memory stays bounded.

Each property runs a few hundred cases by default and thousands under `make test-faults`.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import resource
import tarfile
import tempfile
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache as once
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr import config
from fedlalr.config import ConfigError
from fedlalr.config.overrides import parse_overrides
from fedlalr.config.schema import Config
from fedlalr.data.population import as_clients
from fedlalr.data.sources import DataCorrupt, DataNotFound, archive, cache, cifar, gutenberg, idx, scripts
from fedlalr.federation import Expected, Rejection, Reply, screen_reply
from fedlalr.federation.checkpoint import CheckpointError, canonical, load_checkpoint
from fedlalr.federation.fingerprint import contract
from fedlalr.federation.payload import Refused, array_from_npy
from fedlalr.federation.run import initial_state
from fedlalr.federation.rundir import RunDirectoryError
from fedlalr.training.layout import Layout
from fedlalr.training.work import Training

SHORT, LONG = 60, 5000
SLOW, SLOW_LONG = 20, 1000
"""The same of a property that takes long."""
MEMORY = 700 << 20
"""Bytes by which a whole property may raise the peak of the process."""


def fuzz(
    short: int = SHORT, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a property in its short form by default and in its long form under the marker `faults`."""

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        long = SLOW_LONG if short == SLOW else LONG

        @pytest.mark.parametrize(
            "examples", [short, pytest.param(long, marks=[pytest.mark.faults, pytest.mark.timeout(3600)])]
        )
        def test(examples: int) -> None:
            @settings(
                max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None,
                derandomize=examples == short,
            )  # fmt: skip
            @given(**strategies)
            def body(**drawn: Any) -> None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    check(**drawn)

            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            body()
            assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY

        test.__doc__ = check.__doc__
        return test

    return decorate


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Something that was once this: cut, flipped, repeated, grown, or nothing of it left."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "insert", "repeat", "zero", "number", "other"])):
            case "flip" if content:
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[place : place + draw(st.integers(1, 64))]
            case "insert":
                content[place:place] = draw(st.binary(max_size=16))
            case "repeat":
                content[place:place] = content[place : place + 32]
            case "zero":
                content[place : place + 8] = bytes(8)
            case "number":
                content[place : place + 8] = draw(st.sampled_from([b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"99999999"]))
            case "other":
                content = bytearray(draw(st.binary(max_size=64)))
    return bytes(content)


# Configurations

PRESET = config.dump(config.load("quickstart")).encode()
keys = st.sampled_from(
    [*Config.model_fields, *(f"algorithm.{name}" for name in ("name", "lr", "betas", "eps")), "partition.alpha"]
)


def load_text(content: bytes) -> Config | None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "some.yaml"
        file.write_bytes(content)
        try:
            return config.load(file)
        except ConfigError as error:
            message = str(error)
    assert len(message) < 20_000
    return None


@fuzz(SLOW, content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode) | damaged(PRESET))
def test_a_file_is_a_configuration_or_a_config_error(content):
    found = load_text(content)
    if found is not None:
        assert load_text(config.dump(found).encode()) == found


@fuzz(SLOW, tree=st.dictionaries(keys, json_values, max_size=5))
def test_any_values_under_the_right_keys_are_a_configuration_or_a_config_error(tree):
    base = json.loads(json.dumps(config.load("quickstart").model_dump()))
    for key, value in tree.items():
        section, _, option = key.partition(".")
        if option and isinstance(base.get(section), dict):
            base[section][option] = value
        else:
            base[section] = value
    load_text(json.dumps(base).encode())


@fuzz(SLOW, texts=st.lists(st.text(max_size=40) | st.tuples(keys, st.text(max_size=20)).map("=".join), max_size=4))
def test_any_overrides_are_a_configuration_or_a_config_error(texts):
    with suppress(ConfigError):
        parse_overrides(texts)
    with suppress(ConfigError):
        config.load("quickstart", texts)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 3_000,
        b"{a: " * 3_000,
        b"- " * 3_000 + b"a",
        b"description: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(b"k%d: &%c [%s]\n" % (i, 98 + i, b", ".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
        b"rounds: " + b"9" * 5_000,
        b"rounds: 1e999999999",
        b"a: !!python/object/apply:os.system ['true']",
        b"\xff\xfe\x00",
        b"&a [*a]",
        b"description: &a {b: *a}",
    ],
    ids=["lists", "tables", "dashes", "laughs", "digits", "exponent", "python", "utf-16", "cycle", "cycle 2"],
)
def test_a_bomb_in_a_configuration_is_a_config_error(content):
    assert load_text(content) is None


# Checkpoints

KEPT_FILE = "kept-000001.safetensors"


@once
def a_checkpoint() -> tuple[bytes, bytes, bytes, Any]:
    """A real one: description, tensors, what the clients keep, and a state that looks like it."""
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
            load_checkpoint(place, a_checkpoint()[3], ("c_i",))
        except CheckpointError:
            return False
        return True


def test_the_checkpoint_that_is_damaged_below_is_whole():
    assert load_parts(*a_checkpoint()[:3])


@fuzz(data=st.data())
def test_a_damaged_checkpoint_is_a_checkpoint_error(data):
    whole = a_checkpoint()[:3]
    which = data.draw(st.sets(st.integers(0, 2), min_size=1))
    parts = [data.draw(damaged(part)) if i in which else part for i, part in enumerate(whole)]
    if load_parts(*parts):
        assert json.loads(parts[0]) == json.loads(whole[0])
        assert tuple(parts[1:]) == whole[1:]


def described(content: dict[str, Any], tensors: bytes) -> bytes:
    content = content | {"bytes": len(tensors), "sha256": hashlib.sha256(tensors).hexdigest()}
    return json.dumps({"content": content, "sha256": hashlib.sha256(canonical(content)).hexdigest()}).encode()


@fuzz(
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
    load_parts(described(content | changes, forged), forged, forged_kept)


@fuzz(
    content=st.binary(max_size=64)
    | st.builds(lambda n, rest: n.to_bytes(8, "little") + rest, st.integers(0, 2**64 - 1), st.binary(max_size=64))
)
def test_any_bytes_in_the_place_of_tensors_are_an_error(content):
    description, _, kept, _ = a_checkpoint()
    assert not load_parts(described(json.loads(description)["content"], content), content, kept)


@once
def a_run() -> dict[str, bytes]:
    folder = Path(tempfile.mkdtemp())
    fl.run(
        make_model(), make_clients(), fl.FedAvg(0.1), rounds=2, local=fl.Steps(1), run_dir=folder, engine="reference"
    )
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@fuzz(SLOW, data=st.data())
def test_a_damaged_run_directory_goes_on_or_says_why_not(data):
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
            return
        assert [record.round for record in result.metrics] == [1, 2]


# Replies

MODEL = torch.nn.Linear(3, 2).double()
TRAINING = Training(
    model=MODEL, layout=Layout.of(MODEL), clients=as_clients(make_clients(features=3)), algorithm=fl.FedLALR(),
    loss=torch.nn.functional.cross_entropy, local=fl.Steps(1), device=torch.device("cpu"),
)  # fmt: skip
EXPECTED = Expected(
    run="run",
    round=1,
    clients=frozenset({0, 1}),
    contract=contract(TRAINING),
    layout=TRAINING.layout,
    table=TRAINING.algorithm.slots,
    broadcast=initial_state(TRAINING).slots,
)


def honest() -> Reply:
    slots = {
        slot: {name: view.numpy().copy() for name, view in TRAINING.layout.views(values).items()}
        for slot, values in EXPECTED.broadcast.items()
    }
    return Reply(0, "run", 1, EXPECTED.contract, samples=3, steps=1, slots=slots)


odd_arrays = hnp.arrays(
    hnp.scalar_dtypes() | st.sampled_from([np.dtype(">f8"), np.dtype("f8"), np.dtype("O"), np.dtype("V4")]),
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=4),
    elements=None,
    fill=st.nothing(),
) | st.sampled_from([np.zeros((2, 3))[:, ::-1], np.zeros(2), np.zeros((2, 3), "f4"), torch.zeros(2), torch.zeros(2, 3)])
odd_values = json_values | hnp.arrays("f8", st.sampled_from([(2, 3), (2,), (3, 2), (1,), ()])) | st.binary(max_size=8)
odd_arrays_or_values = odd_values | st.sampled_from(
    [np.zeros((2, 3), ">f8"), np.zeros((2, 3), "O"), np.zeros((2, 3), "f4"), np.zeros((2, 6))[:, ::2]]
)


@fuzz(data=st.data())
def test_any_reply_is_taken_or_refused(data):
    reply = honest()
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(["array", "slot", "field", "extra", "number"])):
            case "array":
                slot = data.draw(st.sampled_from(["x", "m", "v_hat"]))
                if isinstance(reply.slots, dict) and isinstance(reply.slots.get(slot), dict):
                    name = data.draw(st.sampled_from(["weight", "bias"]))
                    reply.slots[slot][name] = data.draw(odd_arrays_or_values)
            case "slot" if isinstance(reply.slots, dict):
                reply.slots[data.draw(st.sampled_from(["x", "m", "v_hat", "v"]))] = data.draw(json_values)
            case "extra" if isinstance(reply.slots, dict) and isinstance(reply.slots.get("x"), dict):
                reply.slots["x"][data.draw(st.text(max_size=5))] = np.zeros(2)
            case "number":
                array = np.zeros((2, 3))
                array.flat[data.draw(st.integers(0, 5))] = data.draw(st.floats())
                if isinstance(reply.slots, dict) and isinstance(reply.slots.get("v_hat"), dict):
                    reply.slots["v_hat"]["weight"] = array
            case "field":
                field = data.draw(
                    st.sampled_from(["run", "round", "contract", "samples", "steps", "slots", "buffers", "metrics"])
                )
                value = data.draw(json_values)
                if field != "metrics" or isinstance(value, dict):
                    reply = replace(reply, **{field: value})
    outcome = screen_reply(reply, EXPECTED)
    if isinstance(outcome, Rejection):
        assert 0 < len(outcome.reason) < 1000
    else:
        assert all(torch.isfinite(values).all() for values in outcome.slots.values())
        assert (outcome.slots.v_hat >= EXPECTED.broadcast.v_hat).all()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@fuzz(content=st.binary(max_size=200) | damaged(npy(np.arange(6.0))))
def test_any_bytes_are_the_expected_array_or_refused(content):
    with suppress(Refused):
        assert array_from_npy("x", content, (6,), torch.float64).shape == (6,)


# Data files


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
IDX = idx.encode(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))


def png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((2, 1024, 3), np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def tar(compression: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=f"w:{compression}") as out:
        for name in ("a", "b"):
            member = tarfile.TarInfo(f"folder/{name}")
            member.size = 100
            out.addfile(member, io.BytesIO(b"x" * 100))
    return stream.getvalue()


SAFETENSORS = safetensors.numpy.save({"inputs": np.zeros(3, np.uint8)}, metadata={"format": "fedlalr-data-1"})


@fuzz(content=st.binary(max_size=100) | damaged(IDX), dimensions=st.sampled_from([1, 3]))
def test_any_bytes_are_an_idx_file_or_corrupt(content, dimensions):
    allowed(idx.parse, content, "a file", dimensions)


@fuzz(content=st.binary(max_size=100) | damaged(gzip.compress(IDX * 20)))
def test_any_bytes_are_a_gzip_file_or_corrupt(content):
    plain = allowed(archive.gunzip, content, "a file", limit=1000)
    assert plain is None or len(plain) <= 1000


@fuzz(content=st.binary(max_size=100) | damaged(PICKLE))
def test_any_bytes_are_a_pickle_of_cifar_or_corrupt(content):
    allowed(cifar.read_python, content, "a file", 0)


@fuzz(content=st.binary(max_size=100) | damaged(b"\1" + bytes(3072)), coarse=st.sampled_from([0, 20]))
def test_any_bytes_are_a_binary_file_of_cifar_or_corrupt(content, coarse):
    allowed(cifar.read_binary, content, "a file", coarse)


@fuzz(image=damaged(png()), labels=st.binary(max_size=50) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_sheet_is_read_or_corrupt(image, labels):
    contents = {"a.png": image, "b.png": png(), "train_lables.json": labels, "test_lables.json": b"[1, 2]"}
    allowed(cifar.read_sheets, contents, "a package", ("a",), "b")


@fuzz(content=st.binary(max_size=100) | damaged(tar("gz")) | damaged(tar("")))
def test_any_bytes_are_an_archive_or_corrupt(content):
    in_file(content, "archive.tar.gz", lambda path: archive.from_tar(path, ["a", "b"]))


@fuzz(content=st.binary(max_size=100) | damaged(SAFETENSORS))
def test_any_bytes_are_a_cached_data_set_or_corrupt(content):
    in_file(content, "mnist.safetensors", lambda path: cache.load(path, "mnist"))


@fuzz(header=st.dictionaries(st.sampled_from(["format", "name", "origin", "sha256", "x"]), st.text(max_size=10)))
def test_any_header_of_a_cached_data_set_is_read_or_corrupt(header):
    arrays = {"inputs": np.zeros(3, np.uint8)}
    known = {"format": "fedlalr-data-1", "name": "mnist", "sha256": cache._digest(arrays)}
    content = safetensors.numpy.save(arrays, metadata={**header, **{k: known[k] for k in known if k not in header}})
    in_file(content, "mnist.safetensors", lambda path: cache.load(path, "mnist"))


WINDOW = "a" * 80
leaf_users = st.dictionaries(
    st.text(max_size=5),
    st.fixed_dictionaries({"x": st.just([WINDOW]) | json_values, "y": st.just(["b"]) | json_values}) | json_values,
    max_size=3,
)


@fuzz(users=leaf_users, listed=st.none() | json_values, rest=json_values)
def test_any_json_is_a_file_of_leaf_or_corrupt(users, listed, rest):
    whole = {"users": list(users) if listed is None else listed, "user_data": users}
    for content in (whole, rest, {"users": rest, "user_data": rest}):
        in_file(json.dumps(content).encode(), "all.json", lambda path: scripts.from_leaf([path]))


@fuzz(
    content=st.binary(max_size=100)
    | damaged(json.dumps({"users": ["a"], "user_data": {"a": {"x": [WINDOW], "y": ["b"]}}}).encode())
)
def test_any_bytes_are_a_file_of_leaf_or_corrupt(content):
    in_file(content, "all.json", lambda path: scripts.from_leaf([path]))


@fuzz(
    text=st.text(max_size=300)
    | st.lists(
        st.sampled_from(
            ["ACT I", "SCENE I. A room", "HAM.", "  HAMLET. To be", "", "[Exit", "Enter KING]", "THE END", "\x00", "é"]
        ),
        max_size=30,
    ).map("\n".join)
)
def test_any_text_is_a_play_or_corrupt(text):
    allowed(gutenberg.speeches, text, "a play")
    in_file(text.encode("utf-8", "surrogatepass"), "play.txt", lambda path: scripts.from_folder(path.parent))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b"[" * 200_000, "train_lables.json"),
        (b"[1" + b",1" * 2_000_000 + b"]", "train_lables.json"),
    ],
    ids=["nested", "long"],
)
def test_a_bomb_of_labels_is_corrupt(content, name):
    contents = {"a.png": png(), "b.png": png(), "test_lables.json": b"[1, 2]"} | {name: content}
    assert allowed(cifar.read_sheets, contents, "a package", ("a",), "b") is None


def test_a_deeply_nested_file_of_leaf_is_corrupt():
    assert in_file(b'{"users": ' + b"[" * 200_000, "all.json", lambda path: scripts.from_leaf([path])) is None


def test_a_gzip_bomb_is_corrupt_before_memory_is_taken():
    bomb = gzip.compress(bytes(100 << 20), compresslevel=1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert allowed(archive.gunzip, bomb, "a file", limit=1000) is None
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 50 << 20


def test_an_image_bomb_is_corrupt():
    image = bytearray(png())  # the header states a height of which the rest has nothing
    image[20:24] = (2**28).to_bytes(4, "big")
    image[29:33] = zlib.crc32(image[12:29]).to_bytes(4, "big")
    contents = {"a.png": bytes(image), "b.png": png(), "train_lables.json": b"[1]", "test_lables.json": b"[1, 2]"}
    assert allowed(cifar.read_sheets, contents, "a package", ("a",), "b") is None
