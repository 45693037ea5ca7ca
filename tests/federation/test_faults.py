"""Death at any instant, full disks, interrupts: the run resumes to the same bits, and the last good state is kept.

The short forms run by default; `make test-faults` runs the long ones.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import fedlalr as fl
from conftest import make_clients, make_model
from federation import fault_counts
from federation.interruptible import interruptible
from federation.small_disk import fill, small_disk
from fedlalr.algorithms import ALGORITHMS
from fedlalr.federation.storage.journal import RunDirectoryError

posix = pytest.mark.skipif(os.name != "posix", reason="forks and signals as POSIX has them")


def crash(kind: str, root: Path, **options: object) -> dict[str, int]:
    return crash_in_turn(root, (kind, options))[0]


def crash_in_turn(root: Path, *kinds: tuple[str, dict[str, object]]) -> list[dict[str, int]]:
    """Run `crashing.py`, which fails unless every resumed run gives the bits of an uninterrupted run.

    One process for several kinds: its imports take longer than some of them.
    """
    script = Path(__file__).with_name("crashing.py")
    done = subprocess.run(
        [sys.executable, str(script), str(root), json.dumps(kinds)],
        capture_output=True,
        text=True,
        env=interruptible(PYTHONWARNINGS="ignore"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tallies: list[dict[str, int]] = [json.loads(line) for line in done.stdout.splitlines()[-len(kinds) :]]
    for tally in tallies:
        fault_counts.deaths.update(tally)
    return tallies


@pytest.fixture
def memory(tmp_path):
    """A folder in memory, if possible: it keeps what a killed process wrote, and flushing costs nothing."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    folder = shared / f"fedlalr-test-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


FILED = ["fedlalr", "scaffold", "fedamsv2"]
"""Algorithms that write different things to files."""


ASYNCHRONOUS = {"asynchronous": {"buffer": 2, "concurrency": 4}, "rounds": 8}
"""With clients in flight at every checkpoint, some of them for several updates."""


@posix
def test_a_run_killed_at_some_operations_on_files_or_at_random_instants_resumes_to_the_same_bits(memory):
    synchronous, asynchronous, instants = crash_in_turn(
        memory,
        ("operations", {"rounds": 2, "stride": 7}),
        ("operations", {"stride": 43, **ASYNCHRONOUS}),
        ("times", {"deaths": 3, "algorithm": "scaffold", "width": 2000}),
    )
    assert synchronous["kills"] >= 4
    assert synchronous["half_written"] >= 1
    assert asynchronous["kills"] >= 4
    assert instants["kills"] + instants["interrupts"] >= 3


@pytest.mark.faults
@posix
def test_a_run_killed_while_it_merges_what_clients_keep_resumes_to_the_same_bits(memory):
    options = {"algorithm": "scaffold", "hyperparameters": {"lr": 0.1}, "rounds": 5, "cohort": 2, "kept_files": 2}
    tally = crash("operations", memory, stride=4, **options)
    assert tally["kills"] >= 15
    assert tally["half_written"] >= 1


@posix
@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("width", "every"), [(16, 1), (30_000, 2)])
def test_an_asynchronous_run_killed_at_many_random_instants_resumes_to_the_same_bits(width, every, memory):
    tally = crash("times", memory, deaths=100, width=width, every=every, **ASYNCHRONOUS)
    assert tally["kills"] >= 50
    assert tally["interrupts"] >= 10


@posix
@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("algorithm", FILED)
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_killed_at_every_operation_on_files_resumes_to_the_same_bits(algorithm, engine, every, memory):
    """On the stacked engine, which is slow to start, at every third one, each algorithm at another third."""
    first, stride = (1, 1) if engine == "reference" else (1 + FILED.index(algorithm), 3)
    options = {"algorithm": algorithm, "engine": engine, "every": every, "first": first, "stride": stride}
    tally = crash("operations", memory, rounds=4, **options)
    assert tally["kills"] >= 30 / stride
    assert tally["half_written"] >= 5 / stride


@posix
@pytest.mark.faults
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_killed_at_some_operations_resumes_to_the_same_bits(name, memory):
    """Each at other operations than the one before it."""
    tally = crash("operations", memory, algorithm=name, stride=11, first=1 + 3 * list(ALGORITHMS).index(name) % 11)
    assert tally["kills"] >= 4


@posix
@pytest.mark.faults
def test_a_run_on_workers_killed_at_some_operations_resumes_to_the_same_bits(memory):
    tally = crash("operations", memory, engine="workers:2", stride=10, first=5)
    assert tally["kills"] >= 4


@posix
@pytest.mark.faults
@pytest.mark.parametrize("algorithm", ["fedlalr", "scaffold"])
def test_a_run_killed_at_every_stage_of_a_round_resumes_to_the_same_bits(algorithm, memory):
    """In mid-aggregation too: before replies are screened, slots and buffers reduced, the server's state updated."""
    tally = crash("stages", memory, algorithm=algorithm, rounds=3)
    assert tally["kills"] == 7 * 3


@posix
@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("algorithm", "width", "every", "rounds"),
    [("fedlalr", 16, 1, 6), ("fedlalr", 100_000, 1, 3), ("scaffold", 30_000, 1, 4), ("sharedamsgrad", 1000, 3, 6)],
)
def test_a_run_killed_at_many_random_instants_resumes_to_the_same_bits(algorithm, width, every, rounds, tmp_path):
    """Wide models take long to write, so many deaths happen during a write."""
    options = {"algorithm": algorithm, "width": width, "every": every, "rounds": rounds}
    tally = crash("times", tmp_path, deaths=100, seed=width, **options)
    assert tally["kills"] >= 50
    assert tally["interrupts"] >= 10


def run(algorithm: fl.Algorithm | None = None, **options):
    settings = {"rounds": 4, "local": fl.Steps(2), "batch_size": 4, "engine": "reference"}
    return fl.run(make_model(), make_clients(), algorithm or fl.FedLALR(), **(settings | options))


def good(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "checkpoint").rglob("*") if p.is_file()}


def assert_resumes(folder: Path, algorithm: fl.Algorithm | None = None) -> None:
    resumed, whole = run(algorithm, run_dir=folder, resume=True), run(algorithm)
    assert [record.round for record in resumed.history] == [1, 2, 3, 4]
    for slot, values in whole.state.items():
        assert all(torch.equal(value, resumed.state[slot][name]) for name, value in values.items())


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files by the operating system."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@posix
def test_a_file_that_cannot_grow_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    """Writing fails in the middle of the tensors."""
    run(run_dir=tmp_path, rounds=2)
    before = good(tmp_path)
    said = r"round 3 cannot be saved in .*round-000002; fix.*File too large"
    with largest_file(1500), pytest.raises(RunDirectoryError, match=said):
        run(run_dir=tmp_path, resume=True)
    fault_counts.deaths["disk"] += 1
    assert good(tmp_path) == before
    assert_resumes(tmp_path)


@posix
@pytest.mark.faults
@pytest.mark.parametrize("algorithm", [fl.FedLALR(), fl.SCAFFOLD(0.1)], ids=lambda a: type(a).__name__)
def test_a_run_stopped_by_any_limit_on_the_size_of_files_resumes_to_the_same_bits(algorithm, tmp_path):
    """The limit falls into the metrics, what clients keep, the tensors or the description, and at last into nothing."""
    stopped = 0
    for limit in range(0, 3_000, 60):
        folder = tmp_path / str(limit)
        run(algorithm, run_dir=folder, rounds=2)
        before = good(folder)
        try:
            with largest_file(limit):
                run(algorithm, run_dir=folder, resume=True)
        except RunDirectoryError as error:
            stopped += 1
            assert "File too large" in str(error)  # noqa: PT017 - some limits let the run through
            after = good(folder)
            last = {name: content for name, content in before.items() if "round-000002" in name}
            assert last == {name: after[name] for name in last}
        assert_resumes(folder, algorithm)
    fault_counts.deaths["disk"] += stopped
    assert stopped >= 20


@posix
def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", "-o", "size=256k") as disk:
        folder = disk / "run"
        run(run_dir=folder, rounds=2)
        before = good(folder)
        fill(disk / "ballast")
        with pytest.raises(RunDirectoryError, match=r"round 3 cannot be saved in .*: No space left on device"):
            run(run_dir=folder, resume=True)
        fault_counts.deaths["disk"] += 1
        assert good(folder) == before
        (disk / "ballast").unlink()
        assert_resumes(folder)


@posix
@pytest.mark.faults
@pytest.mark.parametrize("algorithm", [fl.FedLALR(), fl.SCAFFOLD(0.1)], ids=lambda a: type(a).__name__)
def test_a_run_on_a_disk_with_any_room_left_stops_and_resumes_to_the_same_bits(algorithm, tmp_path):
    stopped = 0
    with small_disk(tmp_path / "disk", "-o", "size=256k") as disk:
        for pages in range(8):
            folder = disk / f"run-{pages}"
            run(algorithm, run_dir=folder, rounds=2)
            fill(disk / "ballast", leave=4096 * pages)
            try:
                run(algorithm, run_dir=folder, resume=True)
            except RunDirectoryError as error:
                stopped += 1
                assert "No space left on device" in str(error)  # noqa: PT017 - with enough room the run gets through
            (disk / "ballast").unlink()
            assert_resumes(folder, algorithm)
            shutil.rmtree(folder)
    fault_counts.deaths["disk"] += stopped
    assert stopped >= 2


@posix
def test_a_disk_that_turns_read_only_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "run"
        run(run_dir=folder, rounds=2)
        before = good(folder)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(RunDirectoryError, match="cannot be written: Read-only file system"):
            run(run_dir=folder, resume=True)
        fault_counts.deaths["disk"] += 1
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert good(folder) == before
        assert_resumes(folder)
