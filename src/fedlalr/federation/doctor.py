"""Checks this machine for anything that would make a run slow or fail."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from fedlalr.algorithms import FedLALR
from fedlalr.common.reading import at_home
from fedlalr.data.fetch import data_folder
from fedlalr.data.sources import available
from fedlalr.federation.result import Result
from fedlalr.federation.round import ServerState
from fedlalr.federation.run import run
from fedlalr.federation.storage.checkpoint import Checkpoint, save_checkpoint
from fedlalr.training import Steps
from fedlalr.training.machine import half_precision_fault, usable_cores
from fedlalr.training.memory import free_memory

PACKAGES = ("fedlalr", "torch", "numpy", "scipy", "safetensors", "pydantic", "scikit-learn", "flwr")
GIB = 1 << 30
LITTLE_DISK, LITTLE_MEMORY, LITTLE_SHARED_MEMORY = 2 * GIB, 2 * GIB, 1 << 28
SLOW_CHECKPOINT_SECONDS = 1.0
PROBED_PARAMETERS = 1_000_000

Grade = Literal["slow", "limited", "fails"]


@dataclass(frozen=True)
class Finding:
    """A problem that makes runs slow, makes them fail, or affects only some of them (limited), and what to do."""

    grade: Grade
    what: str
    advice: str


@dataclass(frozen=True)
class Health:
    """The environment of a run."""

    versions: dict[str, str | None]
    """None: not installed."""
    machine: str
    cores: int
    """Cores that this process may use."""
    memory: int
    """Free bytes."""
    load: float | None
    """Load average over the last minute."""
    threads: int
    """Threads that torch uses."""
    devices: tuple[str, ...]
    data_folder: str
    data: dict[str, str | None]
    """Where each data set is; None: not downloaded yet."""
    run_folder: str
    disk: dict[str, int]
    """Free bytes in the folders that are written to."""
    checkpoint_seconds: float | None
    """Time to write a checkpoint of a million parameters with three slots; None if that failed."""
    findings: tuple[Finding, ...]


def examine(run_folder: str | Path) -> Health:
    """Inspect the environment, write a temporary checkpoint and do two tiny runs."""
    runs = Path(run_folder)
    folders = {"data": data_folder(), "runs": runs}
    seconds, failure = _time_checkpoint(runs)
    found = {data.name: data.where for data in available()}
    health = Health(
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
        | {"torch": str(torch.__version__)},  # also names the device it was built for
        machine=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=usable_cores(),
        memory=free_memory(torch.device("cpu")),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        threads=torch.get_num_threads(),
        devices=tuple(_devices()),
        data_folder=str(folders["data"]),
        data=found,
        run_folder=str(runs),
        disk={name: shutil.disk_usage(_existing(folder)).free for name, folder in folders.items()},
        checkpoint_seconds=seconds,
        findings=(),
    )
    findings = [*_find(health, failure), *_self_test(), *_half_precision_test()]
    return replace(health, findings=tuple(findings))


def _find(health: Health, failure: str | None) -> Iterator[Finding]:
    if health.threads > health.cores:
        what = f"torch computes with {health.threads} threads on {health.cores} cores"
        yield Finding("slow", what, f"export OMP_NUM_THREADS={health.cores}")
    if health.load is not None and health.load > health.cores + 0.5:
        advice = "other programs slow this machine down, and threads wait for each other: export OMP_NUM_THREADS=1"
        yield Finding("slow", f"{health.load:.1f} processes want {health.cores} cores", advice)
    if not any(device.startswith("cuda") for device in health.devices):
        advice = "experiments of the paper's size take hours here; `fedlalr reproduce all --scale smoke` takes minutes"
        yield Finding("slow", "no GPU", advice)
    if health.memory < LITTLE_MEMORY:
        advice = "use smaller cohorts: fedlalr run … clients_per_round=5"
        yield Finding("slow", f"{health.memory / GIB:.1f} GiB of memory left", advice)
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).total < LITTLE_SHARED_MEMORY:
        advice = "engine='workers' shares memory there; give the container more (docker run --shm-size=2g)"
        yield Finding("fails", f"/dev/shm has only {shutil.disk_usage(shared).total >> 20} MiB", advice)
    for name, free in health.disk.items():
        if free < LITTLE_DISK:
            yield Finding("fails", f"{free / GIB:.1f} GiB of disk left for {name}", _another_folder(name))
    if failure is not None:
        yield Finding("fails", f"no checkpoint can be written: {failure}", _another_folder("runs"))
    elif health.checkpoint_seconds is not None and health.checkpoint_seconds > SLOW_CHECKPOINT_SECONDS:
        what = f"a checkpoint of a million parameters takes {health.checkpoint_seconds:.1f} s"
        yield Finding("slow", what, "write fewer, or to a faster disk: fedlalr run … checkpoint_every=10 --run-dir DIR")
    if reason := _unwritable(data_folder()):
        what = f"the data folder cannot be written, so no data can be fetched: {reason}"
        yield Finding("limited", what, _another_folder("data"))


def _another_folder(name: str) -> str:
    command = "export FEDLALR_DATA=DIR" if name == "data" else "fedlalr run … --run-dir DIR"
    return f"free some space, or use another writable folder: {command}"


def _self_test() -> Iterator[Finding]:
    """Do a tiny run twice: both must give the same finite bits."""
    try:
        first, second = _tiny_run(), _tiny_run()
    except Exception as error:  # a broken installation may raise anything
        advice = "reinstall both: pip install --force-reinstall fedlalr torch"
        yield Finding("fails", f"a tiny run raises {type(error).__name__}: {error}", advice)
        return
    if any(not torch.equal(value, second.state["x"][name]) for name, value in first.state["x"].items()):
        advice = "runs here cannot be repeated exactly; try one thread: export OMP_NUM_THREADS=1"
        yield Finding("fails", "the same tiny run twice gives different bits", advice)
    if not torch.tensor([1e-40]).mul(1).item():
        advice = "v̂ starts at ε²; before every run: torch.set_flush_denormal(False)"
        yield Finding("fails", "very small numbers are flushed to zero", advice)


def _half_precision_test() -> Iterator[Finding]:
    if fault := half_precision_fault(torch.bfloat16):
        what, advice = fault
        yield Finding("limited", f"{what}, so dtype=bfloat16 works on a GPU only", advice)


def _tiny_run() -> Result:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clients = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(3)]
        model = nn.Linear(4, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this machine is busy")  # reported as a separate finding
        return run(model, clients, FedLALR(), rounds=2, local=Steps(2), batch_size=4, device="cpu")


def _time_checkpoint(folder: Path) -> tuple[float | None, str | None]:
    """How long it takes to write a checkpoint to the folder of runs, or why it cannot be written."""
    if reason := _unwritable(folder):
        return None, reason
    state = ServerState(0, FedLALR().init(torch.zeros(PROBED_PARAMETERS)), {})
    try:
        with tempfile.TemporaryDirectory(dir=_existing(folder), prefix=".fedlalr-doctor-") as place:
            began = time.perf_counter()
            save_checkpoint(Path(place), Checkpoint(state, None, 0, {}))
            return time.perf_counter() - began, None
    except OSError as error:
        return None, f"{error.strerror or error} ({folder})"


def _devices() -> Iterator[str]:
    yield f"cpu: {platform.processor() or platform.machine()}"
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}: {properties.name}, {properties.total_memory / GIB:.0f} GiB"


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = at_home(folder).absolute()
    return next(place for place in (folder, *folder.parents) if place.exists())


def _unwritable(folder: Path) -> str | None:
    """Why a folder, even if it does not exist yet, cannot be written to; None if it can."""
    nearest = _existing(folder)
    if not nearest.is_dir():
        return f"{nearest} is a file"
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        return f"{error.strerror or error} ({folder})"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
