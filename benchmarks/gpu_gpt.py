"""Transformers on one GPU: rounds of `fl.run` beside the loop over clients and one model on all batches together.

python benchmarks/gpu_gpt.py tiny small medium lora [--profile]

All contestants run in one process, one round each in turn, in bfloat16 by autocast, on random tokens.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

import fedlalr as fl
from fedlalr.algorithms import Algorithm
from fedlalr.benchmark.jobs import gpt
from fedlalr.benchmark.plain import mean_loss
from fedlalr.data.population import as_clients
from fedlalr.federation.options import Options
from fedlalr.federation.run import Simulation
from fedlalr.federation.session import Problem, Session
from gpu_steps import show_profile


@dataclass(frozen=True)
class Job:
    """Vocabulary, length, width, layers and heads of a GPT, whether it has adapters, and the cohort."""

    sizes: tuple[int, int, int, int, int]
    lora: bool
    clients: int
    steps: int
    batch: int

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return gpt(*self.sizes, lora=self.lora)


JOBS = {
    "tiny": Job((80, 128, 128, 4, 4), False, clients=10, steps=10, batch=8),
    "small": Job((80, 256, 384, 6, 6), False, clients=8, steps=10, batch=16),
    "medium": Job((80, 512, 768, 12, 12), False, clients=4, steps=5, batch=8),
    "lora": Job((50257, 256, 768, 12, 12), True, clients=10, steps=5, batch=8),
    "lora50304": Job((50304, 256, 768, 12, 12), True, clients=10, steps=5, batch=8),
    "toy": Job((11, 8, 16, 2, 2), False, clients=3, steps=2, batch=2),
    "toylora": Job((11, 8, 16, 2, 2), True, clients=3, steps=2, batch=2),
}
"""lora50304: as many tokens as GPT-2 has, rounded up, which makes torch's own products faster."""


def data(job: Job, device: str) -> list[tuple[Tensor, Tensor]]:
    """Sequences of every client and the next tokens."""
    generator = torch.Generator().manual_seed(1)
    vocabulary, length = job.sizes[:2]
    shape = (job.clients, job.steps * job.batch, length + 1)
    tokens = torch.randint(0, vocabulary, shape, generator=generator).to(device)
    return [(mine[:, :-1].contiguous(), mine[:, 1:].contiguous()) for mine in tokens]


def problem(job: Job, algorithm: Algorithm, device: str) -> Problem:
    options = Options.named(
        {
            "rounds": 10**6,
            "batch_size": job.batch,
            "device": device,
            "dtype": torch.bfloat16,
            "engine": "stacked",
            "local": fl.Steps(job.steps),
        }
    )
    return Problem.of(job.make(), as_clients(data(job, "cpu")), algorithm, options)


def ours(job: Job, algorithm: Algorithm, device: str) -> Iterator[None]:
    """The rounds of `fl.run`."""
    mine = problem(job, algorithm, device)
    with Session(mine, Simulation(mine)) as session:
        for _ in session.rounds():
            yield


def trained(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Steps of torch's fused Adam under autocast."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.Adam(parameters, 1e-3, fused=True)
    for inputs, targets in batches:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(inputs.device.type, torch.bfloat16):
            loss = mean_loss(model(inputs), targets)
        loss.backward()
        optimiser.step()


def plain_loop(job: Job, device: str) -> Iterator[None]:
    """One client after another, then the mean of their parameters."""
    model, clients = job.make().to(device), data(job, device)
    while True:
        total: dict[str, Tensor] = {}
        for inputs, targets in clients:
            local = copy.deepcopy(model)
            trained(local, list(zip(inputs.split(job.batch), targets.split(job.batch), strict=True)))
            for name, parameter in local.named_parameters():
                if parameter.requires_grad:
                    total[name] = total.get(name, 0) + parameter.detach() / job.clients
        with torch.no_grad():
            for name, value in total.items():
                model.get_parameter(name).copy_(value)
        yield


def one_model(job: Job, device: str) -> Iterator[None]:
    """One model on the batches of all clients together: no client has its own parameters."""
    model, clients = job.make().to(device), data(job, device)
    parts = [[part.split(job.batch) for part in client] for client in clients]
    batches = [tuple(torch.cat([client[which][k] for client in parts]) for which in (0, 1)) for k in range(job.steps)]
    while True:
        trained(model, batches)
        yield


def race(contestants: dict[str, Iterator[None]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of a round of each contestant, in turn, after two that are not timed."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-2, rounds):
        for name, contestant in contestants.items():
            began = time.perf_counter()
            next(contestant)
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 0:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in times.items()}


def contestants(job: Job, device: str) -> dict[str, Iterator[None]]:
    """Everyone who takes part, by name."""
    return {
        "FedLALR": ours(job, fl.FedLALR(), device),
        "FedAvg": ours(job, fl.FedAvg(), device),
        "plain loop": plain_loop(job, device),
        "one model": one_model(job, device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=["tiny", "small", "medium", "lora"], choices=JOBS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", help="some of FedLALR, FedAvg, plain loop, one model")
    parser.add_argument("--profile", action="store_true", help="show the kernels of a round of FedLALR")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in options.jobs:
        job, device = JOBS[name], options.device
        racing = {who: turn for who, turn in contestants(job, device).items() if who in (options.only or {who})}
        times = race(racing, options.rounds, device)
        tokens = job.clients * job.steps * job.batch * job.sizes[1]
        print(f"{name}: {tokens:,} tokens per round")
        for who, seconds in times.items():
            ratio = f"{times['FedLALR'] / seconds:7.3f} × FedLALR's speed" if "FedLALR" in times else ""
            print(f"  {who:10} {seconds * 1e3:8.1f} ms {tokens / seconds / 1e3:8,.0f} k tokens/s {ratio}", flush=True)
        if options.profile:
            show_profile(partial(next, racing["FedLALR"]), 40)
        racing.clear()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
