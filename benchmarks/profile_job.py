"""Where the time of a job goes: `python benchmarks/profile_job.py cnn [--method fedlalr]`.

One process, one thread, the engine that `auto` would take: one client of a worker for cnn and lstm, a round of the
stack for the small chains. Prints the operators that take more than 3 % of the time, and the page faults.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fedlalr as fl
from fedlalr.algorithms.slots import Slots
from fedlalr.benchmark import JOBS
from fedlalr.data.population import as_clients
from fedlalr.federation.round import Rules, run_round
from fedlalr.federation.session import initial_state
from fedlalr.training import Training
from fedlalr.training.engines.registry import create_engine
from fedlalr.training.engines.worker_process import private_engine
from fedlalr.training.engines.workers import ALLOCATOR
from fedlalr.training.interfaces import Work
from fedlalr.training.layout import Layout

METHODS = {"fedavg": fl.FedAvg(lr=0.1), "fedlalr": fl.FedLALR()}


def prepare(name: str, method: str) -> Callable[[], object]:
    """One client in a worker, or one round of the stack."""
    job = JOBS[name]
    model = job.model()
    training = Training(
        model=model,
        layout=Layout.of(model),
        clients=as_clients(job.data()),
        algorithm=METHODS[method],
        loss=nn.functional.cross_entropy,
        local=fl.Epochs(job.epochs),
        batch_size=job.batch,
        device=torch.device("cpu"),
    )
    state, cohort = initial_state(training), torch.arange(job.cohort)
    if name in ("logistic", "perceptron"):
        engine, _ = create_engine("stacked", training, job.cohort)
        return lambda: run_round(state, cohort, 0.01, engine, training, Rules())
    engine = private_engine(training)
    work = Work(1, 0.01, cohort, state.slots.only(*training.algorithm.slots.down), {}, Slots(), job.cohort, job.clients)
    return lambda: engine.train_client(work, 0, 0, [])


def main() -> None:
    parser = argparse.ArgumentParser(description="Profile a job.")
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--method", choices=METHODS, default="fedavg")
    parser.add_argument("--plain-allocator", action="store_true", help="without the workers' allocator settings")
    options = parser.parse_args()
    if not options.plain_allocator and any(os.environ.get(name) != value for name, value in ALLOCATOR.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)  # it is read at the start
    torch.set_num_threads(1)
    turn = prepare(options.job, options.method)
    for _ in range(4):
        turn()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        turn()
    faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(4):
            turn()
    events = seen.key_averages()
    whole = sum(event.self_cpu_time_total for event in events)
    print(f"{options.job}, {options.method}: {whole / 4e3:.1f} ms under the profiler, {faults} page faults")
    for event in sorted(events, key=lambda event: -event.self_cpu_time_total):
        if event.self_cpu_time_total > 0.03 * whole:
            print(f"  {event.self_cpu_time_total / whole:4.0%}  {event.key}")


if __name__ == "__main__":
    main()
