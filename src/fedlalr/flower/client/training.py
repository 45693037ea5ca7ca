"""A client's round: the same code that trains clients in the simulator, on this node's data alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedlalr.algorithms.slots import Slots
from fedlalr.data.random import MODULES, key
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Buffers, Training, Work


class Answer(NamedTuple):
    """What a client has to say at the end of its round."""

    upload: Slots
    buffers: Buffers
    kept: Slots
    """What it keeps if the upload is accepted."""
    samples: int
    steps: int
    loss: float
    """Mean over the local steps."""


def train_locally(
    instruction: Instruction, training: Training, broadcast: Slots, buffers: Buffers, kept: Slots
) -> Answer:
    """Train one client as its instruction says, from what the server sent and what the client has kept."""
    device, client = training.device, instruction.client
    ids = torch.tensor([client])
    work = Work(
        round=instruction.round,
        lr=instruction.lr,
        clients=ids,
        broadcast=broadcast.map(lambda tensor: tensor.to(device)),
        buffers={name: buffer.to(device) for name, buffer in buffers.items()},
        kept=kept.map(lambda tensor: tensor[None].to(device)),
        cohort=instruction.cohort,
        population=instruction.population,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        # Dropout draws from here. Nodes must not all draw the same, so the client's id is in the key.
        torch.manual_seed(key(training.seed, MODULES, work.round, client))
        upload, new_buffers, new_kept, loss = ReferenceEngine(training).train_client(work, 0, client, [])
    return Answer(
        upload=upload,
        buffers=new_buffers,
        kept=new_kept,
        samples=int(training.clients.sizes[client]),
        steps=int(training.steps(work.round, ids)[0]),
        loss=float(loss),
    )
