"""Death at any instant, full disks, interrupts: the run goes on to the same bits, and the last good state stands.

The short forms run by default; `make test-faults` runs the long ones.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr.federation.rundir import RunDirectoryError

posix = pytest.mark.skipif(os.name != "posix", reason="forks and signals as POSIX has them")


def crash(kind: str, root: Path, **options: object) -> dict[str, int]:
    """Run `crashing.py`, which fails unless every resumed run gives the undisturbed run's bits."""
    script = Path(__file__).with_name("crashing.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, str(script), kind, str(root), json.dumps(options)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tally: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    print(kind, options, tally)
    return tally


@pytest.fixture
def memory(tmp_path):
    """A folder in memory where there is one: what a killed process wrote there stays, and flushing costs nothing."""
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


@posix
def test_a_run_killed_at_some_operations_on_files_goes_on_to_the_same_bits(memory):
    tally = crash("operations", memory, rounds=2, stride=5)
    assert tally["kills"] >= 6
    assert tally["half_written"] >= 1


@posix
def test_a_run_killed_at_random_instants_goes_on_to_the_same_bits(memory):
    tally = crash("times", memory, deaths=4, algorithm="scaffold", width=2000)
    assert tally["kills"] + tally["interrupts"] >= 4


@posix
@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["reference", "stacked"])
@pytest.mark.parametrize("algorithm", ["fedlalr", "scaffold", "fedams"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_run_killed_at_every_operation_on_files_goes_on_to_the_same_bits(algorithm, engine, every, memory):
    name = "fedamsv2" if algorithm == "fedams" else algorithm
    tally = crash("operations", memory, algorithm=name, engine=engine, every=every, rounds=4)
    assert tally["kills"] >= 30
    assert tally["half_written"] >= 5


@posix
@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("algorithm", "width", "every"),
    [("fedlalr", 16, 1), ("fedlalr", 100_000, 1), ("scaffold", 30_000, 1), ("sharedamsgrad", 1000, 3)],
)
def test_a_run_killed_at_many_random_instants_goes_on_to_the_same_bits(algorithm, width, every, tmp_path):
    tally = crash("times", tmp_path, deaths=100, algorithm=algorithm, width=width, every=every, rounds=6, seed=width)
    assert tally["kills"] >= 50
    assert tally["interrupts"] >= 10


def run(**options):
    settings = {"rounds": 4, "local": fl.Steps(2), "batch_size": 4, "engine": "reference"}
    return fl.run(make_model(), make_clients(), fl.FedLALR(), **(settings | options))


def good(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "checkpoint").rglob("*") if p.is_file()}


def assert_goes_on(folder: Path) -> None:
    resumed, whole = run(run_dir=folder, resume=True), run()
    assert [record.round for record in resumed.metrics] == [1, 2, 3, 4]
    for slot, values in whole.state.items():
        assert all(torch.equal(value, resumed.state[slot][name]) for name, value in values.items())


@posix
def test_a_file_that_cannot_grow_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    """The operating system's limit on the size of a file: writing fails in the middle of the tensors."""
    run(run_dir=tmp_path, rounds=2)
    before = good(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))
    try:
        with pytest.raises(RunDirectoryError, match=r"round 3 cannot be saved in .*round-000002; mend.*File too large"):
            run(run_dir=tmp_path, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert good(tmp_path) == before
    assert_goes_on(tmp_path)


def fill(path: Path) -> None:
    """Write a file until the disk has no room left."""
    with path.open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(b"x" * 4096)


@posix
def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        folder = disk / "run"
        run(run_dir=folder, rounds=2)
        before = good(folder)
        fill(disk / "ballast")
        with pytest.raises(RunDirectoryError, match=r"round 3 cannot be saved in .*: No space left on device"):
            run(run_dir=folder, resume=True)
        assert good(folder) == before
        (disk / "ballast").unlink()
        assert_goes_on(folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@posix
def test_a_disk_that_turns_read_only_stops_the_run_and_leaves_the_last_checkpoint(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        folder = disk / "run"
        run(run_dir=folder, rounds=2)
        before = good(folder)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(RunDirectoryError, match="cannot be written: Read-only file system"):
            run(run_dir=folder, resume=True)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert good(folder) == before
        assert_goes_on(folder)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
