"""Virtual time to an accuracy: asynchronous rounds against synchronous ones with over-selection.

    python benchmarks/asynchronous.py digits --seeds 3
    python benchmarks/asynchronous.py cifar10 --device cuda --seeds 3

The clients' speeds are log-normal (sigma 1). Synchronous rounds sample 20 % more clients than they wait for;
asynchronous ones train as many clients at the same time. Both use the rates of the preset, which were tuned for
synchronous rounds, and end when they reach the target. The buffer and the staleness of digits were chosen with seeds 0
to 9. Prints a JSON line for every run, then the ratio of the means.
Needs torch, numpy and safetensors alone; `digits` also scikit-learn's files.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from typing import Any

import torch

import fedlalr as fl
from fedlalr.data.population import Population

OVERSAMPLE, SIGMA = 0.2, 1.0


@dataclass(frozen=True)
class Problem:
    """A problem of the presets."""

    target: float
    cohort: int
    buffer: int
    rounds: int
    """The most synchronous rounds; as many replies are allowed in asynchronous updates."""
    options: dict[str, Any]
    algorithm: fl.Algorithm
    alpha: float

    def load(self, name: str, seed: int) -> tuple[torch.nn.Module, Population]:
        """The model, drawn from the seed, and the clients."""
        torch.manual_seed(seed)
        model = fl.models.MLP(64, 32, 10) if name == "digits" else fl.models.ConvMixer()
        return model, fl.data.load(name, clients=100, scheme="dirichlet", alpha=self.alpha, seed=seed)


PROBLEMS = {
    "digits": Problem(0.9, 10, 3, 60, {"local": fl.Epochs(3), "batch_size": 10}, fl.FedLALR(lr=0.01), alpha=0.3),
    "cifar10": Problem(
        0.75,
        50,
        10,
        60,
        {"local": fl.Epochs(5), "batch_size": 50, "weight_decay": 1e-3, "dtype": torch.bfloat16},
        fl.FedLALR(lr=2e-3, betas=(0.9, 0.995), eps=1e-8),
        alpha=0.6,
    ),
}


class StopAt(fl.Observer):
    """Ends a run that reaches an accuracy."""

    def __init__(self, target: float) -> None:
        self.target = target

    def on_round(self, record: fl.Record) -> None:
        if record.accuracy is not None and record.accuracy >= self.target:
            raise fl.Stop


def measure(name: str, mode: str, seed: int, device: str, buffer: int, staleness: float) -> dict[str, Any]:
    """One run until the target."""
    problem = PROBLEMS[name]
    model, clients = problem.load(name, seed)
    stragglers = fl.Stragglers(oversample=OVERSAMPLE)
    at_once = stragglers.sampled(problem.cohort)
    how: dict[str, Any] = {"clients_per_round": problem.cohort, "stragglers": stragglers, "rounds": problem.rounds}
    if mode == "asynchronous":
        updates = problem.rounds * problem.cohort // buffer
        how = {"asynchronous": fl.Async(buffer=buffer, concurrency=at_once, staleness=staleness), "rounds": updates}
    result = fl.run(
        model,
        clients,
        problem.algorithm,
        speeds=SIGMA,
        seed=seed,
        device=device,
        observers=[StopAt(problem.target)],
        progress=False,
        **problem.options,
        **how,
    )
    last = result.history[-1]
    reached = last.accuracy is not None and last.accuracy >= problem.target
    return {
        "problem": name,
        "mode": mode,
        "seed": seed,
        "target": problem.target,
        "virtual_seconds": sum(record.virtual_seconds or 0.0 for record in result.history) if reached else None,
        "updates": len(result.history),
        "replies": sum(record.clients for record in result.history),
        "staleness": statistics.mean(record.staleness or 0.0 for record in result.history),
        "accuracy": last.accuracy,
        "seconds": sum(record.seconds for record in result.history),
    }


def main() -> None:
    """Run both modes with every seed, and print the ratio of their virtual times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", choices=PROBLEMS)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--buffer", type=int, help="replies in an asynchronous update")
    parser.add_argument("--staleness", type=float, default=1.0, help="exponent of the weight of stale replies")
    given = parser.parse_args()
    buffer = given.buffer or PROBLEMS[given.problem].buffer
    times: dict[str, list[float | None]] = {"synchronous": [], "asynchronous": []}
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for mode, found in times.items():
            measured = measure(given.problem, mode, seed, given.device, buffer, given.staleness)
            found.append(measured["virtual_seconds"])
            print(json.dumps(measured), flush=True)
    means = {mode: None if None in found else statistics.mean(found) for mode, found in times.items()}  # type: ignore[type-var]
    both = means["synchronous"] is not None and means["asynchronous"] is not None
    ratio = means["asynchronous"] / means["synchronous"] if both else None  # type: ignore[operator]
    print(json.dumps({**vars(given), "buffer": buffer, **means, "ratio": ratio}))


if __name__ == "__main__":
    main()
