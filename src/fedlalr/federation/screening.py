"""Which replies may be reduced. One place for the simulator and for deployments.

A reply is refused as a whole, with its client and the reason, and the server's state never sees it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.training.work import Replies


class Rejection(NamedTuple):
    """A client whose reply was left out, and why."""

    client: int
    reason: str


def screen(replies: Replies, broadcast: Slots, table: SlotTable) -> tuple[Replies, tuple[Rejection, ...]]:
    """The replies that may be reduced, and the refused ones with their reasons, both in client order."""
    rejected = [Rejection(client, reason) for client, reason in replies.failures.items()]
    if not len(replies.clients):
        return replies, tuple(sorted(rejected))
    checks = _checks(replies, broadcast, table)
    passed = torch.stack(list(checks.values())).cpu()  # the only synchronisation with the device
    reasons = list(checks)
    for row in torch.nonzero(~passed.all(0)).flatten().tolist():
        reason = reasons[int(torch.nonzero(~passed[:, row])[0])]
        rejected.append(Rejection(int(replies.clients[row]), reason))
    good = torch.nonzero(passed.all(0)).flatten()
    accepted = replies if len(good) == len(replies.clients) else replies.rows(good)
    return accepted, tuple(sorted(rejected))


def _checks(replies: Replies, broadcast: Slots, table: SlotTable) -> dict[str, Tensor]:
    """For each reason to refuse a reply, which replies pass, `[R]`."""
    checks = {f"{name} is not finite": _finite(values) for name, values in replies.slots.items()}
    checks |= {
        f"buffer {name} is not finite": _finite(values)
        for name, values in replies.buffers.items()
        if values.is_floating_point()
    }
    checks |= {f"kept {name} is not finite": _finite(values) for name, values in replies.kept.items()}
    checks |= {
        f"{name} fell below the broadcast {name}": (replies.slots[name] >= broadcast[name]).flatten(1).all(1)
        for name in table.grows
    }
    return checks


def _finite(values: Tensor) -> Tensor:
    return torch.isfinite(values).flatten(1).all(1)
