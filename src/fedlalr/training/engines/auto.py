"""What `engine="auto"` picks, by a rule that depends on the job and the kind of machine, never on timing.

1. On a GPU: `stacked`, where the network can be stacked, else `reference`.
2. On a CPU, for one client a round: `reference`.
3. On a CPU, for a chain of linear layers with at most 1,000,000 parameters: `stacked`. Most of such a network's time is
   overhead, which a stack pays once for all clients.
4. On a CPU with several cores, for a round of at least 10⁹ multiplications or a network with recurrent layers:
   `workers`, if copies of the data for them fit into an eighth of the machine's memory. Memory-mapped NumPy files are
   not copied.
5. Else `reference`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from fedlalr.training.interfaces import Training
from fedlalr.training.machine import usable_cores
from fedlalr.training.stacked.linear import linear_chain
from fedlalr.training.torch_internals import DispatchMode
from fedlalr.training.torch_state import copied, forked_generators, in_mode

MOST_PARAMETERS = 1_000_000
"""Up to which size a chain of linear layers is stacked on a CPU."""
WORTH_PROCESSES = 1e9
"""Multiplications of a round from which on worker processes pay."""
MOST_SHIPPED = 1 / 8
"""Part of the machine's memory up to which data are copied for worker processes."""


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
    """Whether a round is so much arithmetic, forward and twice as much backward, that processes for it pay."""
    if any(isinstance(layer, nn.RNNBase) for layer in training.model.modules()):
        return True
    return 3 * multiplications(training) * samples_of_round(training, cohort) >= WORTH_PROCESSES


def samples_of_round(training: Training, cohort: int) -> float:
    """How many samples go through the network in a round, each counted as often as it does; by the first clients."""
    sizes = training.clients.sizes.double()
    clients = torch.arange(min(len(sizes), 1000), device="cpu")
    batch = sizes[clients] if training.batch_size is None else sizes[clients].clamp(max=training.batch_size)
    return float((training.steps(1, clients) * batch).mean()) * cohort


def estimated_seconds(training: Training, cohort: int) -> float:
    """About how long a round takes on the CPU: the gradient of one small batch is timed, on a copy of the network."""
    inputs, targets = training.clients.batch(0, torch.zeros(8, dtype=torch.int64, device="cpu"))
    model = copied(training.model).eval()  # BatchNorm gets one sample eight times
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    began = time.perf_counter()
    with (
        forked_generators(training.device),
        torch.autocast("cpu", training.compute, enabled=training.compute is not None),
    ):
        torch.autograd.grad(training.loss(model(inputs), targets), parameters, allow_unused=True)
    return (time.perf_counter() - began) / len(targets) * samples_of_round(training, cohort)


def multiplications(training: Training) -> int:
    """Of one sample's forward pass, whatever modules make them."""
    model, counted = training.model, Multiplications()
    inputs, _ = training.clients.batch(0, torch.arange(1, device="cpu"))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which makes one operation of a whole layer of a transformer
    try:
        with torch.no_grad(), forked_generators(training.device), in_mode(model, training=False), counted:
            model(inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counted.total


class Multiplications(DispatchMode):
    """Counts those of products of matrices, convolutions and attention, which every module comes down to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        match func.overloadpacket.__name__:
            case "mm" | "bmm" | "mv" | "dot":
                self.total += result.numel() * args[0].shape[-1]
            case "addmm" | "baddbmm" | "addmv":
                self.total += result.numel() * args[1].shape[-1]
            case "convolution":
                inputs, weight, is_transposed = args[0], args[1], args[6]
                self.total += (inputs if is_transposed else result).numel() * weight[0].numel()
            case name if name.startswith("_scaled_dot_product"):
                self.total += (args[0].numel() + result[0].numel()) * args[1].shape[-2]
        return result
