"""A round over Flower's grid: ask the cohort's nodes, take their replies in as they come, close at the deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence

from flwr.app import ConfigRecord, Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from fedlalr.federation.observers import Observer
from fedlalr.federation.replies.payload import Refused
from fedlalr.federation.round import RoundOutcome
from fedlalr.federation.run import with_included
from fedlalr.flower.server.nodes import Roster
from fedlalr.flower.server.state import FederatedServer, OpenRound
from fedlalr.flower.wire.messages import Post, failure
from fedlalr.flower.wire.records import array_records, instruct, reply_in

GRACE = 60.0
"""Seconds that a message outlives the deadline of its round, so that clocks may differ a little."""

log = logging.getLogger("flwr.fedlalr")


def check_no_probes(observers: Sequence[Observer], rounds: Iterable[int]) -> None:
    """Refuse observers of local steps, since those steps are made on other machines."""
    for t in rounds:
        for observer in observers:
            if observer.probe(t) is not None:
                raise ValueError(
                    f"a {type(observer).__name__} looks at the local steps of round {t}, which is possible in the "
                    f"simulator alone; leave it out of the observers"
                )


class Rounds:
    """Plays the rounds of one server, one after another."""

    def __init__(
        self,
        server: FederatedServer,
        observers: Sequence[Observer] = (),
        *,
        deadline: float,
        join_deadline: float,
        poll: float,
    ) -> None:
        self.server, self.observers = server, observers
        self.deadline, self.join_deadline, self.poll = deadline, join_deadline, poll
        self._roster: Roster | None = None
        self._opened: OpenRound | None = None
        self._sent: list[tuple[int, Message]] = []

    def ask(self, grid: Grid, config: ConfigRecord) -> list[Message]:
        """Begin the next round: draw the cohort, wait for its nodes, and make the message for each."""
        server, roster = self.server, self._known(grid)
        check_no_probes(self.observers, [server.state.round + 1])  # one may have thought of it since
        opened = server.open(self._included)
        nodes = roster.wait_for(opened.cohort, server.rules.min_clients, time.monotonic() + self.join_deadline)
        for client in opened.cohort:
            if client not in nodes:
                opened.inbox.refuse(client, roster.reason(client))
        self._opened, self._sent = opened, []
        if len(nodes) >= server.rules.min_clients:  # otherwise no client need train: the round cannot succeed
            work = opened.work
            arrays = array_records(work.broadcast, work.buffers, server.training.layout, server.layout)
            for client, node in sorted(nodes.items()):
                content = instruct(arrays, server.instruction(opened, client), config)
                message = Message(content, node, MessageType.TRAIN, ttl=self.deadline + GRACE, group_id=str(work.round))
                self._sent.append((client, message))
        return [message for _, message in self._sent]

    def deliver(self, grid: Grid, messages: Sequence[Message]) -> Iterator[Message]:
        """Send the round's messages, and give the replies as they come until the deadline."""
        post: Post[None] = Post(grid)
        post.send([(None, message) for message in messages])
        for _, reply in post.until(time.monotonic() + self.deadline, self.poll):
            yield reply

    def close(self, replies: Iterable[Message]) -> RoundOutcome:
        """Take the replies in one by one and end the round; `RoundFailed` where too few of them can be used."""
        opened, sent = self._opened, self._sent
        if opened is None:
            raise RuntimeError("there is no round to close; begin one first")
        heard: set[int] = set()
        for reply in replies:
            # A message gets its id when it is sent, which may be only now.
            asked = {message.metadata.message_id: client for client, message in sent}
            client = asked.get(reply.metadata.reply_to_message_id)
            if client is None:
                log.warning("a reply to no message of round %d is ignored", opened.work.round)
                continue
            heard.add(client)
            self._take(opened, client, reply)
        for client, _ in sent:
            if client not in heard:
                opened.inbox.refuse(client, f"no reply within the {self.deadline:g} s that a round waits")
        self._opened, self._sent = None, []
        return self.server.close(opened)

    def _take(self, opened: OpenRound, client: int, reply: Message) -> None:
        """Screen one reply of one client."""
        inbox = opened.inbox
        if reply.has_error():
            inbox.refuse(client, failure(reply))
            return
        try:
            found = reply_in(reply.content, inbox.expected, self.server.layout)
        except Refused as refused:
            inbox.refuse(client, refused)
            return
        except Exception as error:  # the content may be anything, and so may be what reading it runs into
            inbox.refuse(client, f"its reply cannot be read: {type(error).__name__}: {error}")
            return
        if found.client != client:
            inbox.refuse(client, f"its node answered as client {found.client}")
            return
        inbox.receive(found)

    def _known(self, grid: Grid) -> Roster:
        if self._roster is None or self._roster.grid is not grid:
            self._roster = Roster(grid, self.server.contract, self.server.population, self.poll)
        return self._roster

    def _included(self, cohort: Tensor, round: int) -> Tensor:
        return with_included(cohort, self.observers, round, self.server.population)
