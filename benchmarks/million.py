"""A million clients: memory and round time must not grow with the population.

    python benchmarks/million.py [--clients 1000 1000000] [--rounds 30] [--engine stacked]

Every client has four samples of a pool that all populations share, so the only thing that differs is the number of
clients: their index arrays, 8 bytes a sample and 8 a client. 50 of them train in a round. Each population runs in a
process of its own; times are medians over the rounds after the first five, taken in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

import fedlalr as fl
from fedlalr.data.partition import Partition
from fedlalr.data.population import Population

POOL, FEATURES, SAMPLES, COHORT = 100_000, 64, 4, 50


def population(clients: int) -> Population:
    """Clients with four samples each out of one pool."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(POOL, FEATURES, generator=generator)
    targets = torch.randint(0, 10, (POOL,), generator=generator)
    indices = np.arange(clients * SAMPLES, dtype=np.int64) % POOL
    return Population(inputs, targets, Partition(indices, np.arange(clients + 1, dtype=np.int64) * SAMPLES))


class Clock(fl.Observer):
    """Writes down how long a round took and waits for a line before the next one."""

    def on_round(self, record: fl.Record) -> None:
        print(json.dumps({"seconds": record.seconds}), flush=True)
        sys.stdin.readline()


def serve(clients: int, rounds: int, engine: str) -> None:
    """One population in this process, a round for every line on standard input."""
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    data = population(clients)
    built = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fl.run(
        fl.models.MLP(FEATURES, 32, 10),
        data,
        fl.FedLALR(),
        rounds=rounds,
        clients_per_round=COHORT,
        local=fl.Epochs(2),
        batch_size=2,
        engine=engine,
        device="cpu",
        observers=[Clock()],
    )
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    arrays = data.partition.indices.nbytes + data.partition.offsets.nbytes
    seconds = time.perf_counter() - began
    print(json.dumps({"data": built - before, "run": after - built, "arrays": arrays, "total": seconds}), flush=True)


def ask(process: subprocess.Popen[str], wake: bool) -> str:
    """Let a process go on, and the next line that it writes."""
    assert process.stdin is not None
    assert process.stdout is not None
    if wake:
        process.stdin.write("\n")
        process.stdin.flush()
    return process.stdout.readline()


def compare(populations: list[int], rounds: int, engine: str) -> None:
    """Run the populations in turns, a round of each, and print a table."""
    command = [sys.executable, __file__, "--engine", engine, "--rounds", str(rounds), "--serve"]
    processes = {
        clients: subprocess.Popen([*command, str(clients)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for clients in populations
    }
    seconds: dict[int, list[float]] = {clients: [] for clients in populations}
    for t in range(rounds):
        for clients, process in processes.items():
            seconds[clients].append(json.loads(ask(process, wake=t > 0))["seconds"])
    print(f"engine {engine}, {COHORT} clients a round, {os.cpu_count()} cores, one thread, torch {torch.__version__}")
    print("| clients | round, median ms | index arrays MB | memory for the data MB | memory beyond it MB |")
    print("|---|---|---|---|---|")
    for clients, process in processes.items():
        memory = json.loads(ask(process, wake=True))
        process.wait()
        median = 1e3 * statistics.median(seconds[clients][5:])
        parts = [memory["arrays"] / 1e6, memory["data"] * 1024 / 1e6, memory["run"] * 1024 / 1e6]
        print(f"| {clients:,} | {median:.2f} | " + " | ".join(f"{part:.1f}" for part in parts) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1_000, 30_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--engine", default="stacked")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.rounds, given.engine)
    else:
        compare(given.clients, given.rounds, given.engine)
