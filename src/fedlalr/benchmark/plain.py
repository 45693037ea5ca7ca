"""The loop that everybody writes first: the baseline of the benchmark."""

from __future__ import annotations

import copy
import random

import torch
from torch import Tensor, nn

from fedlalr.benchmark.jobs import BenchmarkJob


def plain_round(
    job: BenchmarkJob, model: nn.Module, clients: list[tuple[Tensor, Tensor]], cohort: list[int]
) -> nn.Module:
    """One round of federated averaging: copy, train, average the state dicts."""
    states = []
    half = getattr(torch, job.compute) if job.compute and job.autocast and clients[0][0].is_cuda else None
    for client in cohort:
        inputs, targets = clients[client]
        local = copy.deepcopy(model)
        local.train()
        optimizer = torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=job.lr)
        for _ in range(job.epochs):
            for batch in torch.split(torch.randperm(len(targets)), job.batch):
                optimizer.zero_grad()
                with torch.autocast(inputs.device.type, half, enabled=half is not None):
                    loss = mean_loss(local(inputs[batch]), targets[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        frozen = {name for name, p in local.named_parameters() if not p.requires_grad}
        states.append({name: value for name, value in local.state_dict().items() if name not in frozen})
    mean = {
        name: torch.stack([state[name] for state in states]).mean(0) if value.is_floating_point() else value
        for name, value in states[0].items()
    }
    model.load_state_dict(mean, strict=False)
    return model


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy, of sequences with the classes innermost: a view here, and torch is many times faster there."""
    return nn.functional.cross_entropy(outputs.movedim(1, -1).flatten(0, -2), targets.flatten())


def sample(job: BenchmarkJob, generator: random.Random) -> list[int]:
    """The clients of a round."""
    return sorted(generator.sample(range(job.clients), job.cohort))
