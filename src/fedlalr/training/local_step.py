"""The local step of a client or a stack: clipping, weight decay, additional gradients, the algorithm, the upload."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Algorithm, Context, Slots
from fedlalr.training.interfaces import Training
from fedlalr.training.torch_internals import write_counts
from fedlalr.training.torch_state import forked_generators


def starting_slots(algorithm: Algorithm, server: Slots) -> Slots:
    """The initial slots of a client that has kept nothing yet."""
    table = algorithm.slots
    return algorithm.start(server.only(*table.down), table.nothing_kept(server.x))


def local_step(training: Training, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> Slots:
    """Clip the loss gradient, apply weight decay, then take the algorithm's own step."""
    regularisation = training.regularisation
    gradient = regularisation.gradient(gradient, client.x)
    if regularisation.decoupled_weight_decay:
        client = client.replace(x=client.x * regularisation.shrinkage(context.lr))
    return training.algorithm.step(client, gradient, broadcast, context)


def other_gradients(
    training: Training, wanted: Mapping[str, str], client: Slots, gradient_at: Callable[[Tensor], Tensor]
) -> dict[str, Tensor]:
    """The additional gradients of a batch that a slot table requests, by slot; clipped and decayed like that at x."""
    around = training.regularisation
    return {name: around.gradient(gradient_at(client[at]), client[at]) for name, at in wanted.items()}


def without_drawing(gradient_at: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    """A batch's gradient at any parameters, with the same dropout as the gradient at x that follows."""

    def at(x: Tensor) -> Tensor:
        with forked_generators(device):
            return gradient_at(x)

    return at


def check_unwritten(algorithm: Algorithm, broadcast: Slots, before: list[int]) -> None:
    """Reject a method that writes into the broadcast, from which the next client would start."""
    if write_counts(broadcast) != before:
        raise ValueError(
            f"{type(algorithm).__name__} writes into the broadcast in place; its start, step and finish must return "
            f"new tensors, such as client.x - step instead of client.x.sub_(step)"
        )


def finish(training: Training, client: Slots, broadcast: Slots, context: Context) -> tuple[Slots, Slots]:
    """What a client sends and keeps: the slots returned by the algorithm that its table names."""
    algorithm = training.algorithm
    given = algorithm.finish(client, broadcast, context)
    parts = (("sends", algorithm.slots.up), ("keeps", algorithm.slots.kept))
    if not isinstance(given, tuple) or len(given) != 2:
        raise TypeError(f"{type(algorithm).__name__}.finish must return two Slots, what a client sends and keeps")
    for slots, (verb, names) in zip(given, parts, strict=True):
        missing = [name for name in names if name not in slots]
        if missing:
            raise ValueError(
                f"according to its slot table a client of {type(algorithm).__name__} {verb} {', '.join(names)}, "
                f"but its finish returns no {', '.join(missing)} there"
            )
    upload, kept = (slots.only(*names) for slots, (_, names) in zip(given, parts, strict=True))
    for name, slot in kept.items():
        wanted = 1 if name in algorithm.slots.counts else client.x.shape[-1]
        if slot.shape[-1:] != (wanted,):
            raise ValueError(
                f"according to its slot table a client of {type(algorithm).__name__} keeps {wanted} numbers of {name}, "
                f"but its finish returns {list(slot.shape)}; counts= lists slots that are one number"
            )
    means = {name: training.layout.block_means(upload[name]) for name in algorithm.slots.blocks if name in upload}
    return upload.replace(**means) if means else upload, kept
