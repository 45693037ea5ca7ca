"""Personal parameters and local buffers: what stays with a client, around any algorithm.

The server works on the shared coordinates alone; in its own slots the personal ones stay at their initial values, with
which a new client starts. Before training, `to_clients` puts each client's own values into its broadcast; afterwards
`from_clients` takes them out of its reply. For its personal coordinates a client is a federation of one: the
algorithm's `update` turns its upload into their next values, so that every slot of a personal coordinate, also one that
only the server has, stays with the client.

A client keeps, under these names:

    c_i                 the slots that the algorithm's table lists as `kept`, `[P]`
    personal.x          the personal coordinates of each of the server's slots
    buffer.running_mean its buffers, if they are local
    residual.x          the error that a codec left of the shared coordinates, with feedback
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots
from fedlalr.training.interfaces import Buffers, Replies, Training, Work, named
from fedlalr.training.torch_state import set_buffers

SLOT, BUFFER = "personal.", "buffer."
"""Prefixes of the names under which personal coordinates and local buffers are kept."""


def first_kept(training: Training, slots: Slots, buffers: Buffers, residuals: Iterable[str] = ()) -> Slots:
    """What a client keeps that has not taken part yet, from the server's slots and buffers at any time.

    `residuals` are the names of the errors that a compression leaves.
    """
    first = {**training.algorithm.slots.nothing_kept(slots.x)}
    first |= {name: slots.x.new_zeros(training.division.shared.size) for name in residuals}
    if training.personal:
        first |= {SLOT + name: training.division.cut(flat, personal=True) for name, flat in slots.items()}
    if training.buffers == "local":
        first |= {BUFFER + name: buffer for name, buffer in buffers.items()}
    return Slots(**first)


def shared_slots(training: Training, slots: Slots) -> Slots:
    """The shared coordinates of some slots `[…, P]`."""
    if not training.personal:
        return slots
    division = training.division
    return slots.map(lambda flat: division.cut(flat, personal=False))


def with_personal(training: Training, shared: Slots, whole: Slots) -> Slots:
    """Slots with these shared coordinates and the personal ones of others `[P]`."""
    if not training.personal:
        return shared
    division = training.division
    own = whole.map(lambda flat: division.cut(flat, personal=True))
    return Slots(**{name: division.join(flat, own[name]) for name, flat in shared.items()})


def shared_of(training: Training, kept: Slots, name: str) -> Tensor:
    """The shared coordinates of a kept slot."""
    return shared_slots(training, kept.only(name))[name]


def with_shared(training: Training, kept: Slots, name: str, shared: Tensor) -> Slots:
    """Kept slots, one of which has these values at the shared coordinates."""
    return kept.replace(**with_personal(training, Slots(**{name: shared}), kept.only(name)))


def shared_buffers(training: Training, buffers: Buffers) -> Buffers:
    """The buffers that are sent: all or none."""
    return {} if training.buffers == "local" else buffers


def to_clients(work: Work, training: Training) -> Work:
    """The clients' view of a round, from the server's: shared coordinates, and everything that the clients keep."""
    if not training.is_personal:
        return work
    division, count = training.division, len(work.clients)
    own, buffers = named(work.kept, SLOT), named(work.kept, BUFFER)
    if training.personal:
        broadcast = {name: division.join(flat, own[name]) for name, flat in work.broadcast.items()}
    else:
        broadcast = {name: flat.expand(count, -1) for name, flat in work.broadcast.items()}
    sent = {name: buffer.expand(count, *buffer.shape) for name, buffer in work.buffers.items()}
    kept = work.kept.only(*training.algorithm.slots.kept)
    return replace(work, broadcast=Slots(**broadcast), buffers={**sent, **buffers}, kept=kept, per_client=True)


@torch.no_grad()
def from_clients(replies: Replies, work: Work, training: Training) -> Replies:
    """The replies as the server sees them; what stays with the clients is among their kept slots. `work` is the
    server's view of the round."""
    if not training.is_personal:
        return replies
    kept = dict(replies.kept.items())
    if training.personal:
        kept |= _next_values(replies, work, training)
    if training.buffers == "local":
        kept |= {BUFFER + name: buffer for name, buffer in replies.buffers.items()}
    return replace(
        replies,
        slots=shared_slots(training, replies.slots),
        buffers=shared_buffers(training, replies.buffers),
        kept=Slots(**kept),
    )


def load_client(training: Training, x: Tensor, buffers: Buffers, kept: Slots) -> None:
    """Write a client's model into the module: the shared x and buffers that are sent, and its own."""
    if training.personal:
        x = training.division.join(x, kept[f"{SLOT}x"])
    training.layout.load(training.model, x)
    set_buffers(training.model, {**buffers, **named(kept, BUFFER)})


def _next_values(replies: Replies, work: Work, training: Training) -> dict[str, Tensor]:
    """The personal coordinates after the algorithm's update of each client alone."""
    division, spread = training.division, replies.spread
    before = Slots(**named(work.kept, SLOT))
    uploads = replies.slots.map(lambda flat: division.cut(flat, personal=True))
    rows = torch.searchsorted(work.clients, spread.mine(replies.clients)).tolist()
    after = []
    for place, (row, steps) in enumerate(zip(rows, spread.mine(replies.steps).tolist(), strict=True)):
        alone = Context(round=work.round, lr=work.lr, steps=float(steps))
        server = before.map(lambda own, row=row: own[row])  # type: ignore[misc]
        upload = uploads.map(lambda own, place=place: own[place])  # type: ignore[misc]
        after.append(training.algorithm.update(server, upload, alone))
    return {
        SLOT + name: torch.stack([one[name] for one in after]) if after else own[:0] for name, own in before.items()
    }
