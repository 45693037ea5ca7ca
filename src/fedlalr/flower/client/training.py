"""Local training on a node: the simulator's code, on this node's data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.data.random import MODULES, key
from fedlalr.federation.compression.channel import Channel
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Buffers, Training, Work


class Answer(NamedTuple):
    """The result of a client's round."""

    upload: Slots
    content: Mapping[str, Tensor]
    """The bytes of the upload's slots that have a codec."""
    buffers: Buffers
    kept: Slots
    """The client's state if the upload is accepted."""
    samples: int
    steps: int
    loss: float
    """Mean over the local steps."""


def train_locally(
    instruction: Instruction, training: Training, channel: Channel, broadcast: Slots, buffers: Buffers, kept: Slots
) -> Answer:
    """Train one client by its instruction, from the server's broadcast and the client's state."""
    kept = kept.map(lambda tensor: tensor.to(training.device))
    device, client = training.device, instruction.client
    ids = torch.tensor([client])
    work = Work(
        round=instruction.round,
        lr=instruction.lr,
        clients=ids,
        broadcast=broadcast.map(lambda tensor: tensor.to(device)),
        buffers={name: buffer.to(device) for name, buffer in buffers.items()},
        kept=kept.only(*training.algorithm.slots.kept).map(lambda tensor: tensor[None]),
        cohort=instruction.cohort,
        population=instruction.population,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # For dropout. The key contains the client's id, so that nodes do not all draw the same numbers.
        torch.manual_seed(key(training.seed, MODULES, work.round, client))
        upload, new_buffers, new_kept, loss = ReferenceEngine(training).train_client(work, 0, client, [])
    errors, content = channel.upload(upload, work.broadcast, kept, client)
    return Answer(
        upload=upload.only(*channel.table.up),
        content=content,
        buffers=new_buffers,
        kept=new_kept.replace(**errors),
        samples=int(training.clients.sizes[client]),
        steps=int(training.steps(work.round, ids)[0]),
        loss=float(loss),
    )
