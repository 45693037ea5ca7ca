"""Local training on a node: the simulator's code, on this node's data only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.data.random import MODULES, key
from fedlalr.federation.compression.channel import Channel
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Buffers, Replies, Training, Work, write_reply
from fedlalr.training.personal import BUFFER, from_clients, shared_of, to_clients, with_shared
from fedlalr.training.torch_state import forked_generators, seed_generators

CHANGE = "change."
"""The prefix of the name of the change of a kept slot that follows an upload. It is stored beside the slot, as only the
next instruction says how much of it the server took."""


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


class StepLimit:
    """Counts a client's local steps, and stops them at a deadline, in seconds from now; 0: never."""

    def __init__(self, deadline: float, device: torch.device) -> None:
        self.deadline, self.device = deadline, device
        self.steps, self._began = 0, time.monotonic()

    def __call__(self) -> bool:
        """Called after every local step: whether it was the last."""
        self.steps += 1
        if self.deadline and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the step may only have been queued
        return self.deadline > 0 and time.monotonic() - self._began >= self.deadline


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
        broadcast=broadcast,
        buffers=buffers,
        kept=kept.map(lambda tensor: tensor[None]),
        cohort=instruction.cohort,
        population=instruction.population,
        shapes=training.shapes,
    )
    with forked_generators(device):
        # For dropout. The key contains the client's id, so that nodes do not all draw the same numbers.
        seed_generators(device, key(training.seed, MODULES, work.round, client))
        given, limit = to_clients(work, training), StepLimit(instruction.deadline, device)
        memory = Replies.memory(given, training)
        write_reply(memory, 0, *ReferenceEngine(training).train_client(given, 0, client, [], limit))
    replies = from_clients(Replies.of(memory, given, training), work, training)
    broken = [
        name for name, value in replies.kept.items() if not name.startswith(BUFFER) and not value.isfinite().all()
    ]
    if broken:
        raise ValueError(f"the kept {broken[0]} of client {client} is no longer finite; lower the learning rates")
    upload = replies.slots.map(lambda tensor: tensor[0])
    errors, content = channel.upload(upload, broadcast, kept, client)
    after = replies.kept.map(lambda tensor: tensor[0])
    if training.algorithm.slots.follows is not None:
        name, sent = training.algorithm.slots.follows
        taken = channel.decode_reply(sent, content[sent][None], broadcast)[0] if sent in content else upload[sent]
        after = with_shared(training, after, name, shared_of(training, kept, name)).replace(**{CHANGE + name: taken})
    return Answer(
        upload=upload.only(*channel.table.up),
        content=content,
        buffers={name: buffer[0] for name, buffer in replies.buffers.items()},
        kept=after.replace(**errors),
        samples=int(replies.samples[0]),
        steps=limit.steps,
        loss=float(replies.losses[0]),
    )
