"""Asynchronous updates over Flower's grid: nodes train whenever they are free, with the arithmetic of the simulator.

As in the simulator, a client starts at most once from each version, and only usable replies fill the buffer. If nobody
trains any more and nobody is left to start, an update takes the replies it has.

Messages in flight are not part of a checkpoint: a resumed run starts its clients again, from the version it resumes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fedlalr.algorithms.slots import Slots
from fedlalr.federation.asynchronous.clock import Line
from fedlalr.federation.asynchronous.rounds import reduce_arrived, stored
from fedlalr.federation.asynchronous.settings import Async
from fedlalr.federation.replies.payload import Rejected
from fedlalr.federation.replies.screening import Rejection, measure_reply
from fedlalr.federation.round import RoundOutcome, Stopwatch
from fedlalr.federation.run import reject_chosen_clients
from fedlalr.flower.server.rounds import Rounds
from fedlalr.flower.server.state import Offer
from fedlalr.flower.wire.messages import Post
from fedlalr.training.personal import shared_slots


class Flight(NamedTuple):
    """A client that was sent a version and has not replied."""

    client: int
    offer: Offer
    slots: Slots
    """The server's shared slots of that version."""
    since: float


@dataclass
class Period:
    """What happened since the last update."""

    started: list[int] = field(default_factory=list)
    arrived: list[tuple[int, int, Slots]] = field(default_factory=list)
    """Client, version and what is stored of its reply."""
    rejected: list[Rejection] = field(default_factory=list)


class BufferedRounds(Rounds):
    """Runs asynchronous updates of one server, one after another."""

    _post: Post[Flight] | None = None

    def update(self, grid: Grid, config: ConfigRecord) -> RoundOutcome:
        """Receive replies until there are enough, and let free clients start meanwhile; then update the model."""
        server, clock, period = self.server, Stopwatch(), Period()
        problem, t = server.problem, server.state.round + 1
        how = problem.options.asynchronous
        assert isinstance(how, Async)
        reject_chosen_clients(self.observers, t)
        if self._post is None or self._post.grid is not grid:
            self._post = Post(grid)
        cohort = problem.cohort(t, server.secret)
        self._known(grid).wait_for(cohort.tolist(), server.rules.min_clients, time.monotonic() + self.join_deadline)
        offer = server.offer(cohort)
        offer = offer._replace(work=replace(offer.work, cohort=how.buffer))
        sizes, count = server.training.clients.sizes, how.concurrency
        line = Line(problem.options.sampling, sizes, count, server.secret, t)
        while len(period.arrived) < how.buffer:
            if self._receive(self._post, period, how.buffer):
                continue
            self._give_up(self._post, period)
            started = self._start(grid, self._post, line, count, offer, config)
            period.started += started
            if not self._post.waiting:
                break
            if not started:
                time.sleep(self.poll)
        clock.lap("train")
        work = replace(offer.work, clients=torch.tensor(sorted(period.started), dtype=torch.int64))
        replies = sorted(period.arrived, key=lambda reply: reply[:2])
        outcome = reduce_arrived(
            server.state, work, replies, period.rejected, server.training, server.rules, how, clock
        )
        server.state = outcome.state
        return outcome

    def _receive(self, post: Post[Flight], period: Period, buffer: int) -> bool:
        """Process the replies that are there, until the buffer is full; returns whether there was any."""
        heard = False
        for flight, message in post.arrivals():
            heard, client, work = True, flight.client, flight.offer.work
            try:
                reply = self.read(client, message, flight.offer.expected)
            except Rejected as reason:
                period.rejected.append(Rejection.because(client, reason))
                continue
            measured = measure_reply(reply, replace(flight.offer.expected, clients=frozenset({client})))
            if isinstance(measured, Rejection):
                period.rejected.append(measured)
                continue
            rows = stored(measured[0], work, flight.offer.channel, flight.slots)
            period.arrived.append((client, work.round - 1, rows[client]))
            self.server.accepted_rounds.note(work.round, [client])
            if len(period.arrived) == buffer:
                break
        return heard

    def _give_up(self, post: Post[Flight], period: Period) -> None:
        """Do not wait any longer for clients that passed the deadline."""
        late = time.monotonic() - self.deadline
        for message, flight in list(post.waiting.items()):
            if flight.since < late:
                del post.waiting[message]
                reason = f"no reply within the deadline of {self.deadline:g} s"
                period.rejected.append(Rejection(flight.client, reason))

    def _start(
        self, grid: Grid, post: Post[Flight], line: Line, concurrency: int, offer: Offer, config: ConfigRecord
    ) -> list[int]:
        """Send the current version to free clients until enough train; returns them."""
        server, registry = self.server, self._known(grid)
        registry.refresh()
        nodes, training = registry.nodes(), {flight.client for flight in post.waiting.values()}
        busy = training | (set(range(server.population)) - nodes.keys())
        chosen = line.take(concurrency - len(training), busy)
        messages = self.messages({client: nodes[client] for client in chosen}, offer.work, offer.content, config)
        slots, now = shared_slots(server.training, server.state.slots), time.monotonic()
        post.send([(Flight(client, offer, slots, now), message) for client, message in messages])
        return chosen
