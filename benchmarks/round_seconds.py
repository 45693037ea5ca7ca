"""Time a round of stored runs, one after another, alone on the machine: a few rounds of each with its own settings.

    python benchmarks/round_seconds.py docs/results/seconds.json docs/results/{gpt,vit}/runs/* device=cuda

A folder holds the runs of one method, of which the configuration of seed 0 counts. The seconds of a round are those of
training, encoding, screening and reducing, without testing and checkpoints. The first round, which captures graphs,
does not count. With `--stored`, nothing runs: the rounds are those that the stored run has, which must have had the
machine to itself. Results that the file has are kept, so that the command can be resumed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from fedlalr.common.files import write_whole
from fedlalr.config import load
from fedlalr.config.build import execute
from fedlalr.config.run_dir import RunDirectory
from fedlalr.federation.record import Record

APART = ("evaluate", "checkpoint")
"""Parts of a round that do not count."""


def seconds(record: Record) -> float:
    return sum(value for part, value in record.timing.items() if part not in APART)


def measure(folder: Path, rounds: int, overrides: list[str]) -> list[Record]:
    return execute(load(folder / "seed-0", [*overrides, f"rounds={rounds}"])).history


def main(file: Path, folders: list[Path], rounds: int, overrides: list[str], stored: bool) -> None:
    known = json.loads(file.read_text()) if file.is_file() else {}
    for folder in folders:
        name = folder.relative_to(file.parent).as_posix()
        if name in known:
            continue
        records = RunDirectory(folder / "seed-0").records() if stored else measure(folder, rounds, overrides)
        found = [seconds(record) for record in records[1:]]
        known[name] = {
            "seconds": statistics.median(found),
            "least": min(found),
            "most": max(found),
            "rounds": len(found),
        }
        write_whole(file, json.dumps(known, indent=1, sort_keys=True) + "\n")
        print(f"{known[name]['seconds']:8.3f} s", name, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("folders", nargs="+", help="folders of runs, then overrides such as device=cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stored", action="store_true", help="take the rounds that the runs have")
    arguments = parser.parse_intermixed_args()
    given = arguments.folders
    main(
        arguments.file,
        [Path(one) for one in given if Path(one).is_dir()],
        arguments.rounds,
        [one for one in given if not Path(one).is_dir()],
        arguments.stored,
    )
