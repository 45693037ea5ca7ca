"""How `engine="auto"` chooses, by a rule that depends on the job and the type of machine, never on timing.

1. On a GPU: `stacked` if the network can be stacked, else `reference`.
2. On a CPU with one client per round: `reference`.
3. On a CPU with a chain of linear layers and at most 1,000,000 parameters: `stacked`. Such a network spends most of its
   time on overhead, which a stack pays once for all clients.
4. On a CPU with several cores, if a round has at least 10⁹ multiplications or the network has recurrent layers:
   `workers`, if the copies of the data that they need fit into an eighth of the machine's memory. Memory-mapped NumPy
   files are not copied.
5. Else `reference`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedlalr.training.calling import outputs_of
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Training
from fedlalr.training.machine import usable_cores
from fedlalr.training.stacked.linear import linear_chain
from fedlalr.training.torch_internals import DispatchMode
from fedlalr.training.torch_state import copied, in_mode

MOST_PARAMETERS = 1_000_000
"""Largest chain of linear layers that is stacked on a CPU."""
WORTH_PROCESSES = 1e9
"""Multiplications in a round from which worker processes pay off."""
MOST_SHIPPED = 1 / 8
"""Largest part of the machine's memory for copies of the data in worker processes."""


def candidates(training: Training, cohort: int) -> list[tuple[str, str]]:
    """The engines to try, in order, each with its reason. The last one takes every job."""
    if training.device.type != "cpu":
        return [("stacked", "on a GPU the cohort trains as one stack"), ("reference", "")]
    reference = ("reference", "on a CPU, and small")
    if cohort == 1:
        return [("reference", "one client per round")]
    if is_small_chain(training):
        return [("stacked", "a small chain of linear layers on a CPU"), reference]
    cores = usable_cores()
    if cores > 1 and is_heavy(training, cohort):
        return [("workers", f"stacking this network would be slow on a CPU with {cores} cores"), reference]
    return [reference]


def is_small_chain(training: Training) -> bool:
    """Whether the network is a chain of linear layers, and not too large."""
    if training.layout.size > MOST_PARAMETERS:
        return False
    inputs, _ = training.clients.batch(0, torch.arange(1, device="cpu"))
    return isinstance(inputs, Tensor) and linear_chain(training, inputs.shape[1:]) is not None


def is_heavy(training: Training, cohort: int) -> bool:
    """Whether a round has enough arithmetic (a backward pass counts twice a forward pass) for processes to pay off."""
    if any(isinstance(layer, nn.RNNBase) for layer in training.model.modules()):
        return True
    return 3 * multiplications(training) * samples_of_round(training, cohort) >= WORTH_PROCESSES


def samples_of_round(training: Training, cohort: int) -> float:
    """Samples that pass through the network in a round, counted with repetitions; estimated from the first clients."""
    sizes = training.clients.sizes.double()
    clients = torch.arange(min(len(sizes), 1000), device="cpu")
    batch = sizes[clients] if training.step_size is None else sizes[clients].clamp(max=training.step_size)
    return float((training.steps(1, clients) * batch).mean()) * cohort


def estimated_seconds(training: Training, cohort: int) -> float:
    """Estimated duration of a round on the CPU, by timing the gradient of one small batch on a copy of the network."""
    count = 8
    inputs, targets = training.clients.batch(0, torch.zeros(count, dtype=torch.int64, device="cpu"))
    model = copied(training.model).eval()  # BatchNorm gets one sample eight times
    engine = ReferenceEngine(replace(training, model=model))
    began = time.perf_counter()
    engine.gradient_at_once(inputs, targets)
    return (time.perf_counter() - began) / count * samples_of_round(training, cohort)


def multiplications(training: Training) -> int:
    """Multiplications in one sample's forward pass, for any modules."""
    model, counted = training.model, Multiplications()
    batch = training.clients.batch(0, torch.arange(1, device="cpu"))
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it runs a whole transformer layer as one operation
    try:
        with torch.no_grad(), in_mode(model, training=False), counted:
            outputs_of(model, training.loss, *batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return counted.total


class Multiplications(DispatchMode):
    """Counts multiplications in matrix products, convolutions and attention, which all modules are built from."""

    def __init__(self) -> None:
        super().__init__()
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
