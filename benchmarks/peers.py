"""This library against its peers: `python benchmarks/peers.py --install --environments ENVIRONMENTS`.

Each peer lives in an environment of its own below ENVIRONMENTS, which `--install` makes with pip (once; with the same
torch as here). All contestants run federated averaging with plain SGD on the same data and network, for the same local
steps and batch size, one thread a process, nothing evaluated or written, and take turns: see `fedlalr.benchmark`.

What differs: pfl walks through a client's samples in their order, all others shuffle them; pfl takes clients in turn,
all others draw them; FedLab reads samples through torch's DataLoader, which it leaves to its user.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from pathlib import Path

from fedlalr.benchmark import JOBS, Contestant, ours, plain_loop, race
from fedlalr.benchmark.results import as_dict, machine, plot_races, report

PEERS = {"pfl": "pfl==0.6.0", "fluke": "fluke-fl==0.8.1", "fedlab": "fedlab==1.3.0"}
"""What each environment holds."""
HERE = Path(__file__).parent / "contestants"


def install(environments: Path) -> None:
    """Make the peers' environments, where they are not there yet."""
    torch = f"torch=={machine()['torch']}"
    for name, requirement in PEERS.items():
        folder = environments / name
        if not folder.exists():
            print(f"installing {requirement} into {folder}", flush=True)
            venv.create(folder, with_pip=True)
            subprocess.run([folder / "bin" / "pip", "install", "--quiet", torch, requirement], check=True)


def contestants(job: str, environments: Path, engines: list[str], methods: list[str]) -> list[Contestant]:
    """The plain loop, every peer and this library."""

    def peer(name: str, environment: str, script: str, *arguments: str) -> Contestant:
        python = environments / environment / "bin" / "python"
        return Contestant(name, (str(python), str(HERE / script), *arguments, job, "1"))

    return [
        plain_loop(job),
        peer("pfl 0.6.0, one process", "pfl", "pfl_contestant.py"),
        peer("pfl 0.6.0, two workers", "pfl", "pfl_workers.py", "2"),
        peer("fluke 0.8.1", "fluke", "fluke_contestant.py"),
        peer("FedLab 1.3.0", "fedlab", "fedlab_contestant.py"),
        *(ours(job, engine, method) for engine in engines for method in methods),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time this library against its peers.")
    parser.add_argument("--environments", type=Path, required=True, help="folder with an environment for each peer")
    parser.add_argument("--install", action="store_true", help="make the environments first")
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["cnn", "lstm"])
    parser.add_argument("--engines", nargs="+", default=["auto"])
    parser.add_argument("--methods", nargs="+", default=["fedavg"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("runs/peers"), help="where the numbers and the plot go")
    options = parser.parse_args()
    if options.install:
        install(options.environments)
    races = {}
    for job in options.jobs:
        print(f"{job}:", file=sys.stderr)
        races[job] = race(
            contestants(job, options.environments, options.engines, options.methods),
            options.rounds,
            on_round=lambda name, turn, seconds: print(f"  {turn} {name}: {seconds:.3f} s", file=sys.stderr),
        )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "peers.json").write_text(json.dumps(as_dict(races), indent=1))
    plot_races(races, options.out / "peers.png")
    print(report(races))


if __name__ == "__main__":
    main()
