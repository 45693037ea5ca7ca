"""The contestants of this library, each a process: `python -m fedlalr.benchmark.contestant plain cnn 1 cpu`.

Internal: started by `race`.
"""

from __future__ import annotations

import random
import sys

import torch

from fedlalr.benchmark.jobs import GPU_JOBS, JOBS, BenchmarkJob
from fedlalr.benchmark.plain import plain_round, sample
from fedlalr.benchmark.turns import Turns

_FOR_EVER = 10**9


def run_plain(job: BenchmarkJob, device: str) -> None:
    """The plain loop."""
    turns, generator = Turns(), random.Random(0)
    model = job.model().to(device)
    clients = [(inputs.to(device), targets.to(device)) for inputs, targets in job.data()]
    turns.ready()
    while True:
        model = plain_round(job, model, clients, sample(job, generator))
        finish(device)
        turns.lap()


def run_ours(job: BenchmarkJob, device: str, engine: str, method: str) -> None:
    """This library."""
    import fedlalr as fl
    from fedlalr.algorithms import registry

    turns = Turns()

    class Hook(fl.Observer):
        def on_start(self, info: object) -> None:
            turns.ready()

        def on_round(self, record: object) -> None:
            finish(device)
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
        device=device,
        dtype=getattr(torch, job.compute) if job.compute and device != "cpu" else None,
        observers=[Hook()],
    )


def finish(device: str) -> None:
    """Wait until a GPU has finished its queued work."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def main(kind: str, job: str, threads: str, device: str, *options: str) -> None:
    torch.set_num_threads(int(threads))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    chosen = (JOBS | GPU_JOBS)[job]
    if kind == "plain":
        run_plain(chosen, device)
    else:
        run_ours(chosen, device, *options)


if __name__ == "__main__":
    main(*sys.argv[1:])
