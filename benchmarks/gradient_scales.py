"""The scale of gradients across layers, clients, entries and tokens: a GPT on Shakespeare, ConvMixer on CIFAR-10.

    python benchmarks/gradient_scales.py

FedAvg trains each network for some rounds, with the rate of its preset. Then the root mean square of the gradient of
every parameter tensor is taken for each of ten clients, over five batches. Printed are standard deviations of its
decimal logarithm: across tensors (mean over clients), across clients (mean over tensors), within a tensor, across its
entries, and across tokens, the rows of an embedding. A deviation of 1 is a factor of ten.
"""

from __future__ import annotations

import argparse
import json

import torch

import fedlalr as fl
from fedlalr import config
from fedlalr.config import build_model, build_population


def scales(preset: str, rounds: int, clients: int = 10, batches: int = 5, batch: int = 5) -> dict[str, float]:
    """The spreads of one problem."""
    settings = config.load(preset)
    population = build_population(settings)
    model = build_model(settings.model, population, seed=0)
    if rounds:
        rate = settings.methods["fedavg"]["lr"]
        model = fl.run(
            model,
            population,
            fl.FedAvg(lr=rate),
            rounds=rounds,
            clients_per_round=5,
            local=fl.Steps(10),
            batch_size=batch,
        ).model
    squares: dict[str, list[torch.Tensor]] = {}
    for client in range(clients):
        sums: dict[str, torch.Tensor] = {}
        for i in range(batches):
            inputs, targets = population.batch(client, torch.arange(batch * i, batch * (i + 1)))
            loss = torch.nn.functional.cross_entropy(*_as_rows(model(inputs), targets))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
                sums[name] = sums.get(name, torch.zeros(())) + gradient.double() ** 2 / batches
        for name, total in sums.items():
            squares.setdefault(name, []).append(total)
    table = torch.stack([torch.stack([s.mean().sqrt() for s in each]) for each in squares.values()]).log10()
    entries = [torch.stack(each).mean(0).flatten() for each in squares.values() if each[0].numel() > 1]
    within = [e[e > 0].sqrt().log10().std() for e in entries if (e > 0).sum() > 1]
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
    rows = [torch.stack(each).mean((0, 2)) for name, each in squares.items() if name in tables]
    tokens = [row[row > 0].sqrt().log10().std() for row in rows]
    return {
        "across tensors": float(table.std(0).mean()),
        "across clients": float(table.std(1).mean()),
        "within a tensor": float(torch.stack(within).mean()),
    } | ({"across tokens": float(torch.stack(tokens).mean())} if tokens else {})


def _as_rows(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets of every position as rows."""
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1).long()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("presets", nargs="*", default=["gpt-shakespeare", "cifar10"])
    parser.add_argument("--rounds", type=int, nargs="+", default=[0, 10])
    arguments = parser.parse_args()
    for rounds in arguments.rounds:
        for preset in arguments.presets:
            print(json.dumps({"preset": preset, "rounds": rounds, **scales(preset, rounds)}))
