"""What the parts of a round cost: training, screening, reduction, evaluation, checkpoint.

    python benchmarks/round_parts.py quickstart rounds=20
    python benchmarks/round_parts.py cifar10 rounds=5
    python benchmarks/round_parts.py --job perceptron

Every round of a preset is saved, or every so many with --save-every. A job of the benchmarks is run by FedLALR on the
stacked engine with one thread, and nothing is evaluated or saved. Medians over the rounds after the first.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

import fedlalr as fl
from fedlalr import config
from fedlalr.benchmark import JOBS

ROUNDS = 40
"""Of a job."""


def run_preset(preset: str, overrides: list[str], save_every: int) -> fl.Result:
    chosen = config.load(preset, [f"checkpoint_every={save_every}", *overrides])
    with tempfile.TemporaryDirectory() as folder:
        return config.execute(chosen, Path(folder) / "run")


def run_job(name: str) -> fl.Result:
    torch.set_num_threads(1)
    job = JOBS[name]
    return fl.run(
        job.model(),
        job.data(),
        fl.FedLALR(),
        rounds=ROUNDS,
        clients_per_round=job.cohort,
        local=fl.Epochs(job.epochs),
        batch_size=job.batch,
        engine="stacked",
        device="cpu",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("preset", nargs="?", default="quickstart")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--job", choices=JOBS, help="a job of the benchmarks instead of a preset")
    parser.add_argument("--save-every", type=int, default=1, metavar="ROUNDS", help="of a preset (default: 1)")
    arguments = parser.parse_args()
    if arguments.job:
        result = run_job(arguments.job)
    else:
        result = run_preset(arguments.preset, arguments.overrides, arguments.save_every)
    records = result.history[1:]
    seconds = statistics.median(record.seconds for record in records)
    print(
        f"{result.info.engine} on {result.info.device}, {result.info.parameters:,} parameters: {seconds:.4f} s a round"
    )
    for part in records[-1].timing:
        median = statistics.median(record.timing[part] for record in records)
        print(f"  {part}: {median * 1000:.2f} ms, {median / seconds:.2%}")


if __name__ == "__main__":
    main()
