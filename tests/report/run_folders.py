"""Small real runs to report on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fedlalr import config
from fedlalr.federation import Record, Rejection
from fedlalr.report.runs import METRICS_FILE
from settings import replaced

SMALL = ("rounds=3", "partition.clients=12", "clients_per_round=4", "local.steps=2", "engine=reference")


def make_run(folder: Path, *overrides: str) -> Path:
    """A run of the quickstart, shortened, in a folder."""
    config.execute(config.load("quickstart", replaced(SMALL, overrides)), folder)
    return folder


def copy_run(run: Path, folder: Path) -> Path:
    """A copy of a run that a test may change."""
    return Path(shutil.copytree(run, folder))


@contextmanager
def watching(*arguments: Path | str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command `fedlalr watch` in a process of its own, and the address that it printed."""
    command = [sys.executable, "-m", "fedlalr", "watch", *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[0]
        finally:
            process.terminate()


def refuse(metrics: Path) -> None:
    """Write into a run's records that a client was refused."""
    records = [Record.from_json(line) for line in metrics.read_text().splitlines()]
    refused = [replace(record, rejected=(Rejection(3, "x is not finite"),)) for record in records]
    metrics.write_text("".join(f"{record.to_json()}\n" for record in refused))


def make_comparison(folder: Path) -> Path:
    """Two methods over two seeds, FedLALR's with trajectories and rejections, as `fedlalr compare` lays them out."""
    for seed in (0, 1):
        make_run(folder / "fedavg" / f"seed-{seed}", "algorithm=fedavg", f"seed={seed}")
        followed = make_run(
            folder / "fedlalr" / f"seed-{seed}", f"seed={seed}", "trajectory={clients: [3, 5], rounds: [1, 3]}"
        )
        refuse(followed / METRICS_FILE)
    make_run(folder / "grid" / "fedavg" / "lr=0.1" / "seed-1000", "algorithm=fedavg", "seed=1000", "rounds=1")
    return folder
