"""Forged or endless files and pipes raise documented errors: no traceback, no hang, little memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import save_file
from typer.testing import CliRunner

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.cli import app
from fedlalr.data.fetch import DataCorrupt
from fedlalr.data.sources import cache
from fedlalr.federation.storage.checkpoint import sealed
from fedlalr.federation.storage.journal import RunDirectoryError

pytestmark = [pytest.mark.skipif(os.name != "posix", reason="pipes as POSIX has them"), pytest.mark.timeout(60)]
ENDLESS = 30 << 30
QUICK = ["quickstart", "clients_per_round=3", "local.epochs=1", "-q"]


def run(folder: Path, **options: Any) -> fl.Result:
    settings = {"rounds": 2, "local": fl.Steps(1), "engine": "reference", **options}
    return fl.run(make_model(), make_clients(), fl.SCAFFOLD(0.1), run_dir=folder, **settings)


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result.exit_code, result.output


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Limit memory to two gigabytes more than now: reading a large file raises instead of bringing the machine down."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the library and one of the command."""
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "library")
    assert command("run", *QUICK, "rounds=2", "--run-dir", folder / "command")[0] == 0
    return folder


@pytest.fixture
def library(runs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs / "library", tmp_path / "library"))


def seal(place: Path, content: dict[str, Any]) -> None:
    whole = sealed(content)
    (place / "checkpoint.json").write_text(json.dumps(whole))


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(ENDLESS)


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def with_one_changed(tree: Any, value: Any) -> Iterator[Any]:
    """Copies of the tree in which one part is replaced by the value."""
    for key in tree if isinstance(tree, dict) else range(len(tree) if isinstance(tree, list) else 0):
        for changed in (value, *with_one_changed(tree[key], value)):
            copy = tree.copy()
            copy[key] = changed
            yield copy


@pytest.mark.parametrize(
    ("value", "every", "first"),
    [(None, 2, 0), (10**9, 1, 0), (-1, 6, 0), (10**30, 6, 1), ("x", 6, 2), ([], 6, 3), ({}, 6, 4)],
    ids=repr,
)
def test_a_checkpoint_of_wrong_types_and_a_right_hash_is_used_or_rejected(
    value: Any, every: int, first: int, library: Path
) -> None:
    """Every part gets two of the values. `threads` of 10**9 is one of them."""
    shutil.rmtree(library / "checkpoint" / "round-000001")
    place = library / "checkpoint" / "round-000002"
    files = {path: path.read_bytes() for path in library.rglob("*") if path.is_file()}
    content, threads = json.loads(files[place / "checkpoint.json"])["content"], torch.get_num_threads()
    rejected = 0
    for forged in islice(with_one_changed(content, value), first, None, every):
        shutil.rmtree(library)
        for path, whole in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(whole)
        seal(place, forged)
        try:
            with warnings.catch_warnings(action="ignore"):
                result = run(library, resume=True, rounds=3)
            assert [record.round for record in result.history] == [1, 2, 3]
        except RunDirectoryError:
            rejected += 1
        assert torch.get_num_threads() == threads
    assert rejected > 30 // every


@pytest.mark.parametrize("line", ['{"loss": "x"}', '{"round": null}', '{"timing": {"train": []}}', '{"rejected": 3}'])
def test_a_record_of_wrong_types_is_rejected(line: str, library: Path) -> None:
    metrics = library / "metrics.jsonl"
    first, second = metrics.read_text().splitlines()
    metrics.write_text(
        json.dumps(json.loads(first) | json.loads(line)).ljust(len(first))[: len(first)] + f"\n{second}\n"
    )
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is damaged"):
        run(library, resume=True, rounds=3)


@pytest.mark.parametrize("replace", [pipe, endless])
@pytest.mark.parametrize(
    "name", ["checkpoint/round-000002/checkpoint.json", "checkpoint/round-000002/state.safetensors"]
)
def test_an_older_checkpoint_serves_where_a_file_of_the_newest_is_none(
    replace: Any, name: str, library: Path, little_memory: None
) -> None:
    replace(library / name)
    with pytest.warns(RuntimeWarning, match="resuming from round 1 instead"):
        assert len(run(library, resume=True).history) == 2


def test_tensors_that_are_too_many_are_not_read_though_the_description_agrees(
    library: Path, little_memory: None
) -> None:
    for round in (1, 2):
        place = library / "checkpoint" / f"round-{round:06d}"
        content = json.loads((place / "checkpoint.json").read_text())["content"]
        if round == 2:
            endless(place / "state.safetensors")
            seal(place, content | {"bytes": ENDLESS})
        else:  # the same with what clients keep
            endless(place.parent / content["kept"][0]["file"])
            content["kept"][0]["bytes"] = ENDLESS
            seal(place, content)
    with pytest.raises(RunDirectoryError, match=r"state\.safetensors.*such a file has at most.*kept-"):
        run(library, resume=True)


def test_metrics_that_are_a_pipe_or_endless_are_rejected(library: Path, tmp_path: Path, little_memory: None) -> None:
    metrics = library / "metrics.jsonl"
    lines = metrics.read_bytes()
    with metrics.open("ab") as file:
        file.truncate(ENDLESS)
    run(library, resume=True)  # everything up to the checkpoint is valid, the rest is truncated
    assert metrics.read_bytes() == lines
    endless(metrics)
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl is damaged"):
        run(library, resume=True)
    pipe(metrics)
    with pytest.raises(RunDirectoryError, match="a pipe"):
        run(library, resume=True)
    (tmp_path / "new").mkdir()
    pipe(tmp_path / "new" / "metrics.jsonl")
    with pytest.raises(RunDirectoryError, match=r"cannot be written: No such device"):
        run(tmp_path / "new")


def test_commands_say_of_pipes_and_endless_files_what_they_are(runs: Path, tmp_path: Path, little_memory: None) -> None:
    folder = Path(shutil.copytree(runs / "command", tmp_path / "run"))
    for name, replace, arguments, code, said in [
        ("other.yaml", pipe, ["run", tmp_path / "run/other.yaml"], 2, "it is a pipe, a device or a folder, not a file"),
        ("other.yaml", endless, ["run", tmp_path / "run/other.yaml"], 2, "such a file has at most"),
        ("summary.json", pipe, ["resume", folder, "rounds=3", "-q"], 0, "after 3 rounds"),
        ("summary.json", endless, ["report", folder], 2, "summary.json is larger than 67,108,864 bytes"),
        ("metrics.jsonl", pipe, ["resume", folder, "rounds=4", "-q"], 2, "metrics.jsonl cannot be read: it is a pipe"),
        ("config.yaml", endless, ["resume", folder], 2, "config.yaml cannot be read: it has 32,212,254,720 bytes"),
        ("config.yaml", pipe, ["resume", folder], 2, "was started from Python"),
    ]:
        replace(folder / name)
        found, output = command(*arguments)
        assert said in output.replace("\n", " "), (name, output)
        assert found == code, output


def test_a_cached_data_set_that_is_endless_is_rejected(tmp_path: Path, little_memory: None) -> None:
    file = tmp_path / "mnist.safetensors"
    save_file({}, file)
    header = json.dumps({"inputs": {"dtype": "U8", "shape": [ENDLESS], "data_offsets": [0, ENDLESS]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(file, 8 + len(header) + ENDLESS)
    with pytest.raises(DataCorrupt, match="larger than any data set"):
        cache.load(file, "mnist")
