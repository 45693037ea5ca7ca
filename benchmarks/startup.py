"""How long `fedlalr run quickstart` takes until its first round is recorded: `python benchmarks/startup.py`.

Beside it the processor time of the whole process, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def once(folder: Path) -> tuple[float, float]:
    """Seconds from the start of the process to the record of its only round, and the processor seconds of it all."""
    before, began = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "fedlalr", "run", "quickstart", "rounds=1", "--quiet", "--run-dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    records = folder / "metrics.jsonl"
    while process.poll() is None and not (records.exists() and records.stat().st_size):
        time.sleep(0.005)
    seconds = time.perf_counter() - began
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed")
    after = os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return seconds, spent


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the start of a run.")
    parser.add_argument("--times", type=int, default=5)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as folder:
        found = [once(Path(folder) / str(i)) for i in range(times)]
    wall, processor = (statistics.median(column) for column in zip(*found, strict=True))
    print(
        f"start to first round: {wall:.2f} s; the whole process takes {processor:.2f} s of processor time; "
        f"load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
