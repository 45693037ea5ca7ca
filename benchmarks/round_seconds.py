"""Time a round of stored runs, one after another, alone on the machine: a few rounds of each with its own settings.

    python benchmarks/round_seconds.py docs/results/seconds.json docs/results/{gpt,vit}/runs/* device=cuda

A folder holds the runs of one method, of which the configuration of seed 0 counts. The seconds of a round are those of
training, encoding, screening and reducing, without testing and checkpoints. The first round, which captures graphs,
does not count. Results that the file has are kept, so that the command can be resumed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch

from fedlalr.common.files import write_whole
from fedlalr.config import load
from fedlalr.config.build import execute
from fedlalr.federation.record import Record

APART = ("evaluate", "checkpoint")
"""Parts of a round that do not count."""


def seconds(record: Record) -> float:
    return record.seconds - sum(record.timing.get(part, 0.0) for part in APART)


def measure(folder: Path, rounds: int, overrides: list[str]) -> dict[str, float | int]:
    """The median, smallest and largest seconds of a round after the first."""
    config = load(folder / "seed-0", [*overrides, f"rounds={rounds}"])
    found = [seconds(record) for record in execute(config).history[1:]]
    return {"seconds": statistics.median(found), "least": min(found), "most": max(found), "rounds": len(found)}


def main(file: Path, folders: list[Path], rounds: int, overrides: list[str]) -> None:
    known = json.loads(file.read_text()) if file.is_file() else {}
    for folder in folders:
        name = folder.relative_to(file.parent).as_posix()
        if name in known:
            continue
        known[name] = measure(folder, rounds, overrides) | {"hardware": hardware(), "torch": torch.__version__}
        write_whole(file, json.dumps(known, indent=1, sort_keys=True) + "\n")
        print(f"{known[name]['seconds']:8.3f} s", name, flush=True)


def hardware() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folders", nargs="+", help="folders of runs, then overrides such as device=cuda")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    given = arguments.folders
    main(
        arguments.file,
        [Path(one) for one in given if Path(one).is_dir()],
        arguments.rounds,
        [one for one in given if not Path(one).is_dir()],
    )
