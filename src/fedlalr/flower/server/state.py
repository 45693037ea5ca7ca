"""The server's state of a run and its rounds: sampling, instructions, replies, update. Independent of the transport.

Sampling, screening, reduction and the update are the simulator's functions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.data.batches import batches_per_pass
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.privacy.mechanism import Mechanism, PrivateReduction, secure_noise
from fedlalr.federation.problem import Problem
from fedlalr.federation.replies.payload import Expected
from fedlalr.federation.replies.reducing import reduce_buffers, weights
from fedlalr.federation.round import RoundOutcome, ServerState, Stopwatch, update_slots
from fedlalr.federation.run import with_included
from fedlalr.federation.storage.fingerprint import contract
from fedlalr.federation.storage.journal import CHECKPOINTS_KEPT
from fedlalr.federation.stragglers import Stragglers
from fedlalr.flower.server.inbox import Closed, SpooledInbox
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.training.interfaces import Buffers, Work
from fedlalr.training.intervals import checked
from fedlalr.training.personal import shared_buffers, shared_slots


class Valid(NamedTuple):
    """Which state of a client is valid."""

    round: int = 0
    """The one after this round; 0 if the client has none yet."""
    taken: float = 1.0
    """The share that the server took of the change that a kept slot follows: less than 1 if it was clipped."""


class AcceptedRounds:
    """The valid state of each client, now and in every checkpoint that a run may resume from."""

    def __init__(self, accepted: Mapping[str, Sequence[Any]] | None = None) -> None:
        self._accepted = {int(client): Valid(*valid) for client, valid in (accepted or {}).items()}
        self._saved: deque[dict[int, Valid]] = deque(maxlen=CHECKPOINTS_KEPT)

    def note(self, round: int, clients: Sequence[int], taken: Sequence[float] = ()) -> None:
        """Record the clients whose replies a round accepted, and the shares that it took; all of each by default."""
        shares = taken or [1.0] * len(clients)
        self._accepted |= {client: Valid(round, share) for client, share in zip(clients, shares, strict=True)}

    def saved(self) -> None:
        """Record that a checkpoint contains the current state."""
        self._saved.append(dict(self._accepted))

    def valid(self, client: int) -> Valid:
        """The valid state of a client."""
        return self._accepted.get(client, Valid())

    def settled(self, client: int) -> int:
        """The oldest round whose state may still be requested; 0 until the maximum number of checkpoints exists."""
        return self._saved[0].get(client, Valid()).round if len(self._saved) == CHECKPOINTS_KEPT else 0

    def as_dict(self) -> dict[str, list[float]]:
        """The content for a checkpoint."""
        return {str(client): list(valid) for client, valid in sorted(self._accepted.items())}


class Offer(NamedTuple):
    """What the clients of a round are sent, and what their replies must look like."""

    work: Work
    expected: Expected
    channel: Channel
    content: Mapping[str, Tensor]
    """The bytes of the broadcast's slots that have a codec."""


class OpenRound(NamedTuple):
    """A round that waits for replies."""

    offer: Offer
    inbox: SpooledInbox
    clock: Stopwatch

    @property
    def cohort(self) -> list[int]:
        """The clients that take part, ascending."""
        clients: list[int] = self.offer.work.clients.tolist()
        return clients


class FederatedServer:
    """Holds the state of a run and advances it by one round at a time."""

    def __init__(
        self,
        problem: Problem,
        state: ServerState,
        *,
        run: str,
        secret: bytes,
        accepted_rounds: AcceptedRounds,
        layout: str = "records",
        spool_folder: str | Path | None = None,
    ) -> None:
        self.problem, self.training, self.rules = problem, problem.training, problem.rules
        self.state = state
        self.run, self.accepted_rounds, self.layout, self.spool_folder = run, accepted_rounds, layout, spool_folder
        self.secret = secret
        """Cohorts are sampled from it. No message contains it: a node that knew it could predict when it is sampled."""
        self.contract = contract(self.training, self.rules.compression, self.rules.mechanism is not None)

    @property
    def population(self) -> int:
        return len(self.training.clients)

    @property
    def train_deadline(self) -> float:
        """Seconds after which clients send what they have; 0: they finish their local steps."""
        stragglers = self.problem.options.stragglers
        return float(stragglers.deadline or 0.0) if isinstance(stragglers, Stragglers) else 0.0

    def open(self) -> OpenRound:
        """Start the next round: sample its cohort, in which observers may replace clients by others."""
        t, mechanism = self.state.round + 1, self.rules.mechanism
        if mechanism is not None:
            mechanism.spend(t)
        sampled = self.problem.cohort(t, self.secret)
        offer = self.offer(with_included(sampled, self.problem.options.observers, t, self.problem))
        return OpenRound(offer, SpooledInbox(offer.expected, self.spool_folder), Stopwatch())

    def offer(self, cohort: Tensor) -> Offer:
        """The current version of the model for some clients."""
        t, training, mechanism = self.state.round + 1, self.training, self.rules.mechanism
        channel = Channel.of(self.rules.compression, training, t)
        slots = shared_slots(training, self.state.slots.only(*training.algorithm.slots.down))
        content = channel.encode_broadcast(slots)
        work = Work(
            round=t,
            lr=self.problem.rate(t),
            clients=cohort,
            broadcast=channel.decoded_broadcast(slots, content),
            buffers=shared_buffers(training, self.state.buffers),
            kept=self.state.slots.only(),
            cohort=len(cohort) if mechanism is None else mechanism.cohort,
            population=self.population,
        )
        expected = Expected(
            run=self.run,
            round=t,
            clients=frozenset(cohort.tolist()),
            contract=self.contract,
            layout=training.division.shared,
            table=self.rules.screening(channel.table)[0],
            broadcast=work.broadcast,
            buffers=work.buffers,
            channel=channel,
            steps=partial(self._steps, t),
            partial=self.train_deadline > 0,
            counts=mechanism is None,
        )
        return Offer(work, expected, channel, content)

    def instruction(self, client: int, work: Work | None = None) -> Instruction:
        """The instruction for one client of a round's cohort; without work, to evaluate the current model."""
        valid = self.accepted_rounds.valid(client)
        return Instruction(
            run=self.run,
            round=work.round if work else self.state.round,
            lr=work.lr if work else 0.0,
            client=client,
            cohort=work.cohort if work else 0,
            population=self.population,
            seed=self.training.seed,
            contract=self.contract,
            layout=self.layout,
            kept=valid.round,
            taken=valid.taken,
            settled=self.accepted_rounds.settled(client),
            deadline=self.train_deadline,
        )

    def close(self, opened: OpenRound) -> RoundOutcome:
        """End a round: reduce the accepted replies and update the state, or raise `RoundFailed` and keep it."""
        (work, _, channel, _), inbox, clock = opened
        training, rules, device = self.training, self.rules, self.training.device
        clock.lap("train")
        try:
            closed = inbox.close(rules.screening(channel.table)[1])
            replies, count = closed.accepted, len(closed.accepted.clients)
            rules.check_enough(work.round, count, closed.rejected)
            clock.lap("screen")
            with torch.no_grad():
                if rules.mechanism is None:
                    share = weights(replies.samples, rules.weighting, training.layout.dtype, device)
                    steps = replies.steps
                    reduced = inbox.reduce(closed, share, rules.reduce)
                    reduced = channel.rebased(reduced, work.broadcast, shared_slots(training, self.state.slots))
                    buffers = reduce_buffers(replies.buffers, share, how=rules.reduce, broadcast=work.buffers)
                else:
                    reduced, buffers, steps, share = self._release(opened, closed, rules.mechanism)
            slots = update_slots(self.state, work, reduced, steps, share, training)
            clock.lap("reduce")
        finally:
            inbox.dispose()
        self.state = ServerState(round=work.round, slots=slots, buffers=buffers or self.state.buffers)
        follows = training.algorithm.slots.follows
        taken = closed.factors.get(follows[1], ()) if follows is not None else ()
        self.accepted_rounds.note(work.round, replies.clients.tolist(), taken)
        return RoundOutcome(
            state=self.state,
            replied=count,
            accepted=count,
            rejected=closed.rejected,
            clipped=closed.clipped,
            cohort=opened.cohort,
            train_loss=float(replies.losses.nanmean()),
            traces=(),
            timing=clock.laps,
            epsilon=None if rules.mechanism is None else rules.mechanism.spend(work.round),
        )

    def _release(
        self, opened: OpenRound, closed: Closed, mechanism: Mechanism
    ) -> tuple[Slots, Buffers, Tensor, Tensor]:
        """The noised slots and buffers, and the public steps and weights, with one upload at a time in memory."""
        offer, server = opened.offer, shared_slots(self.training, self.state.slots)
        private = PrivateReduction(mechanism, self.training, offer.channel, offer.work, server, secure_noise)
        for place, row in enumerate(closed.rows):
            buffers = {name: values[place : place + 1] for name, values in closed.accepted.buffers.items()}
            private.add(opened.inbox.upload(row), buffers)
        return (*private.release(), private.steps, private.share)

    def _steps(self, round: int, samples: int) -> int:
        """Local steps for a number of samples, computed here: methods that scale by them must not trust a client."""
        training = self.training
        batches = batches_per_pass(torch.tensor([samples]), training.step_size, training.drop_last)
        return int(checked(training.local, training.local.steps(round, batches), 1))
