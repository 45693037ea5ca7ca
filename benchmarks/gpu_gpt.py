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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedlalr as fl
from fedlalr.algorithms import Algorithm
from fedlalr.data.population import as_clients
from fedlalr.federation.options import Options
from fedlalr.federation.run import Simulation
from fedlalr.federation.session import Problem, Session
from fedlalr.models import GPT
from gpu_steps import show_profile


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices (Hu et al., "LoRA", ICLR 2022)."""

    def __init__(self, stock: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.stock = stock
        self.down, self.up = nn.Linear(stock.in_features, rank, bias=False), nn.Linear(rank, stock.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.stock(x) + self.up(self.down(x))
        return output


def lora(vocabulary: int, length: int, dim: int, layers: int, heads: int) -> nn.Module:
    """A frozen GPT with adapters on both linear layers of its attention."""
    model = GPT(vocabulary, length, dim, layers, heads)
    model.requires_grad_(False)
    for block in model.blocks:
        attention = block.attention
        attention.inputs, attention.outputs = LoRA(attention.inputs), LoRA(attention.outputs)
    return model


@dataclass(frozen=True)
class Job:
    make: Callable[[], nn.Module]
    vocabulary: int
    length: int
    clients: int
    steps: int
    batch: int


JOBS = {
    "tiny": Job(partial(GPT.tiny, 65), 65, 128, 10, 10, 8),
    "small": Job(partial(GPT.small, 65), 65, 256, 8, 10, 16),
    "medium": Job(partial(GPT.medium, 65), 65, 512, 4, 5, 8),
    "lora": Job(partial(lora, 50257, 1024, 768, 12, 12), 50257, 256, 10, 5, 8),
    "lora, padded": Job(partial(lora, 50304, 1024, 768, 12, 12), 50257, 256, 10, 5, 8),
    "toy": Job(partial(GPT, 11, 8, 16, 2, 2), 11, 8, 3, 2, 2),
    "toylora": Job(partial(lora, 11, 8, 16, 2, 2), 11, 8, 3, 2, 2),
}


def data(job: Job, device: str) -> list[tuple[Tensor, Tensor]]:
    """Sequences of every client and the next tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = (job.clients, job.steps * job.batch, job.length + 1)
    tokens = torch.randint(0, job.vocabulary, shape, generator=generator).to(device)
    return [(mine[:, :-1].contiguous(), mine[:, 1:].contiguous()) for mine in tokens]


def problem(job: Job, algorithm: Algorithm, device: str) -> Problem:
    torch.manual_seed(0)
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
            loss = F.cross_entropy(model(inputs), targets)
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
    batches = [
        tuple(torch.cat([client[which][k] for client in parts]) for which in (0, 1)) for k in range(job.steps)
    ]
    while True:
        trained(model, batches)
        yield


def race(contestants: dict[str, Iterator[None]], rounds: int, device: str) -> dict[str, float]:
    """Median seconds of a round of each contestant, in turn, after three that are not timed."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-3, rounds):
        for name, contestant in contestants.items():
            began = time.perf_counter()
            next(contestant)
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= 0:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", default=["tiny", "small", "medium", "lora"], choices=JOBS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only-ours", action="store_true")
    parser.add_argument("--profile", action="store_true", help="show the kernels of a round")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    for name in options.jobs:
        job, device = JOBS[name], options.device
        contestants = {"FedLALR": ours(job, fl.FedLALR(), device)}
        if not options.only_ours:
            contestants |= {
                "FedAvg": ours(job, fl.FedAvg(), device),
                "plain loop": plain_loop(job, device),
                "one model": one_model(job, device),
            }
        times = race(contestants, options.rounds, device)
        tokens = job.clients * job.steps * job.batch * job.length
        print(f"{name}: " + ", ".join(f"{who} {tokens / t / 1e3:,.0f} k tokens/s" for who, t in times.items()), flush=True)
        if options.profile:
            show_profile(lambda: next(contestants["FedLALR"]), 40)
        if not options.only_ours:
            mine = times["FedLALR"]
            print(
                f"  × plain loop {times['plain loop'] / mine:.2f}, × one model {times['one model'] / mine:.3f}, "
                f"FedLALR / FedAvg {mine / times['FedAvg']:.3f}", flush=True
            )
        del contestants
        gc.collect()
        if device == "cuda":
            print(f"  peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
