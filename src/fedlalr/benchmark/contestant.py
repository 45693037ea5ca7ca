"""The contestants of this library, each a process: `python -m fedlalr.benchmark.contestant plain cnn`.

Not for people: `race` starts it.
"""

from __future__ import annotations

import random
import sys

import torch

from fedlalr.benchmark.jobs import JOBS, Job
from fedlalr.benchmark.plain import plain_round, sample
from fedlalr.benchmark.turns import Turns

_FOR_EVER = 10**9


def run_plain(job: Job) -> None:
    """The plain loop."""
    turns, model, clients, generator = Turns(), job.model(), job.data(), random.Random(0)
    turns.ready()
    while True:
        model = plain_round(job, model, clients, sample(job, generator))
        turns.lap()


def run_ours(job: Job, engine: str, method: str) -> None:
    """This library."""
    import fedlalr as fl
    from fedlalr.algorithms import registry

    turns = Turns()

    class Hook(fl.Observer):
        def on_start(self, info: object) -> None:
            turns.ready()

        def on_round(self, record: object) -> None:
            turns.lap()

    fl.run(
        job.model(),
        job.data(),
        registry.create(method, **({"lr": job.lr} if method == "fedavg" else {})),
        rounds=_FOR_EVER,
        clients_per_round=job.cohort,
        local=fl.Epochs(job.epochs),
        batch_size=job.batch,
        engine=engine,
        device="cpu",
        observers=[Hook()],
    )


def main(kind: str, job: str, threads: str, *options: str) -> None:
    torch.set_num_threads(int(threads))
    if kind == "plain":
        run_plain(JOBS[job])
    else:
        run_ours(JOBS[job], *options)


if __name__ == "__main__":
    main(*sys.argv[1:])
