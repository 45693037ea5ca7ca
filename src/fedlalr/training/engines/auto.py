"""What `engine="auto"` picks, by a rule that depends on the job and the kind of machine, never on timing.

1. On a GPU: `stacked`, where the network can be stacked, else `reference`.
2. On a CPU, for one client a round: `reference`.
3. On a CPU, for a chain of linear layers with at most 1,000,000 parameters: `stacked`. Most of such a network's time is
   overhead, which a stack pays once for all clients.
4. On a CPU with several cores, for a round of at least 10⁹ multiplications or a network with recurrent layers:
   `workers`.
5. Else `reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedlalr.training.interfaces import Training
from fedlalr.training.machine import usable_cores
from fedlalr.training.stacked.linear import linear_chain
from fedlalr.training.torch_state import forked_generators, in_mode

MOST_PARAMETERS = 1_000_000
"""Up to which size a chain of linear layers is stacked on a CPU."""
WORTH_PROCESSES = 1e9
"""Multiplications of a round from which on worker processes pay."""


def candidates(training: Training, cohort: int) -> list[tuple[str, str]]:
    """The engines to try in order, each with the reason for it. The last one takes every job."""
    if training.device.type != "cpu":
        return [("stacked", "on a GPU the cohort trains as one stack"), ("reference", "")]
    reference = ("reference", "on a CPU, and small")
    if cohort == 1:
        return [("reference", "one client a round")]
    if is_small_chain(training):
        return [("stacked", "a small chain of linear layers on a CPU"), reference]
    cores = usable_cores()
    if cores > 1 and is_heavy(training, cohort):
        return [("workers", f"a network that stacks badly on a CPU with {cores} cores"), reference]
    return [reference]


def is_small_chain(training: Training) -> bool:
    """Whether the network is a chain of linear layers, and not too large."""
    if training.layout.size > MOST_PARAMETERS:
        return False
    inputs, _ = training.clients.batch(0, torch.arange(1, device="cpu"))
    return linear_chain(training, inputs.shape[1:]) is not None


def is_heavy(training: Training, cohort: int) -> bool:
    """Whether a round is so much arithmetic that processes for it pay."""
    if any(isinstance(layer, nn.RNNBase) for layer in training.model.modules()):
        return True
    sizes = training.clients.sizes.double()
    clients = torch.arange(min(len(sizes), 1000), device="cpu")
    batch = sizes[clients] if training.batch_size is None else sizes[clients].clamp(max=training.batch_size)
    samples = float((training.steps(1, clients) * batch).mean()) * cohort
    return 3 * multiplications(training) * samples >= WORTH_PROCESSES  # forward, and twice backward


def multiplications(training: Training) -> int:
    """Of one sample's forward pass, counted in linear layers and convolutions."""
    model = training.model
    inputs, _ = training.clients.batch(0, torch.arange(1, device="cpu"))
    counted = 0

    def count(layer: nn.Module, given: tuple[Tensor, ...], result: Tensor) -> None:
        nonlocal counted
        assert isinstance(layer.weight, Tensor)
        each = given[0] if isinstance(layer, _ConvTransposeNd) else result
        counted += each.numel() * layer.weight[0].numel()

    hooks = [layer.register_forward_hook(count) for layer in model.modules() if isinstance(layer, nn.Linear | _ConvNd)]
    try:
        with torch.no_grad(), forked_generators(training.device), in_mode(model, training=False):
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return counted
