"""A round over Flower's grid: message the cohort's nodes, receive their replies, close at the deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from flwr.app import ConfigRecord, Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from fedlalr.federation.evaluation import Score
from fedlalr.federation.observers import Observer
from fedlalr.federation.replies.payload import Expected, Rejected, Reply
from fedlalr.federation.round import RoundOutcome
from fedlalr.flower.server.nodes import NodeRegistry
from fedlalr.flower.server.state import FederatedServer, OpenRound
from fedlalr.flower.wire.arrays import encode
from fedlalr.flower.wire.instruction import Instruction
from fedlalr.flower.wire.messages import Post, failure
from fedlalr.flower.wire.records import array_records, instruct, reply_in, score_in
from fedlalr.training.interfaces import Work
from fedlalr.training.personal import shared_buffers, shared_slots

GRACE = 60.0
"""Seconds by which a message outlives the deadline of its round, to tolerate clock differences."""

log = logging.getLogger("flwr.fedlalr")


def check_no_probes(observers: Sequence[Observer], rounds: Iterable[int]) -> None:
    """Reject observers of local steps, since these run on other machines."""
    for t in rounds:
        for observer in observers:
            if observer.probe(t) is not None:
                raise ValueError(
                    f"a {type(observer).__name__} observes the local steps of round {t}, which is possible only in "
                    f"the simulator; remove it from the observers"
                )


class Rounds:
    """Runs the rounds of one server, one after another."""

    def __init__(self, server: FederatedServer, *, deadline: float, join_deadline: float, poll: float) -> None:
        if server.train_deadline >= deadline:
            raise ValueError(
                f"clients may train for {server.train_deadline:g} s, the deadline of stragglers, but a round waits for "
                f"replies only for {deadline:g} s, the deadline of the strategy; make that one longer"
            )
        self.server, self.observers = server, server.problem.options.observers
        self.deadline, self.join_deadline, self.poll = deadline, join_deadline, poll
        self._registry: NodeRegistry | None = None
        self._opened: OpenRound | None = None
        self._sent: list[tuple[int, Message]] = []

    def ask(self, grid: Grid, config: ConfigRecord) -> list[Message]:
        """Start the next round: sample the cohort, wait for its nodes, and create a message for each."""
        server, registry = self.server, self._known(grid)
        check_no_probes(self.observers, [server.state.round + 1])  # an observer may change its mind
        opened = server.open()
        nodes = registry.wait_for(opened.cohort, server.rules.least, time.monotonic() + self.join_deadline)
        for client in opened.cohort:
            if client not in nodes:
                opened.inbox.reject(client, registry.reason(client))
        self._opened, self._sent = opened, []
        if len(nodes) >= server.rules.least:  # otherwise the round cannot succeed, and no client needs to train
            self._sent = self.messages(nodes, opened.offer.work, opened.offer.content, config)
        return [message for _, message in self._sent]

    def messages(
        self, nodes: Mapping[int, int], work: Work, content: Mapping[str, Tensor], config: ConfigRecord
    ) -> list[tuple[int, Message]]:
        """A message for the node of each client, ascending."""
        server, training = self.server, self.server.training
        shared, blocks = training.division.shared, training.algorithm.slots.blocks
        arrays = array_records(encode(work.broadcast, work.buffers, shared, server.layout, blocks, content))
        made = []
        for client, node in sorted(nodes.items()):
            told = instruct(arrays, server.instruction(client, work), config)
            message = Message(told, node, MessageType.TRAIN, ttl=self.deadline + GRACE, group_id=str(work.round))
            made.append((client, message))
        return made

    def deliver(self, grid: Grid, messages: Sequence[Message]) -> Iterator[Message]:
        """Send the round's messages, and yield the replies as they arrive, until the deadline."""
        post: Post[None] = Post(grid)
        post.send([(None, message) for message in messages])
        for _, reply in post.until(time.monotonic() + self.deadline, self.poll):
            yield reply

    def close(self, replies: Iterable[Message]) -> RoundOutcome:
        """Process the replies one by one and end the round; raises `RoundFailed` if too few are usable."""
        opened, sent = self._opened, self._sent
        if opened is None:
            raise RuntimeError("there is no round to close; start one first")
        heard, inbox, problem = set[int](), opened.inbox, self.server.problem
        enough = len(sent) if problem.options.stragglers is None else problem.cohort_size
        for reply in replies:
            # A message gets its id when it is sent, which may have just happened.
            asked = {message.metadata.message_id: client for client, message in sent}
            client = asked.get(reply.metadata.reply_to_message_id)
            if client is None:
                log.warning("ignoring a reply that answers no message of round %d", opened.offer.work.round)
                continue
            heard.add(client)
            try:
                inbox.receive(self.read(client, reply, inbox.expected))
            except Rejected as reason:
                inbox.reject(client, reason)
            if len(sent) > enough and len(inbox.expected.answered) == enough:
                break  # more clients were sampled than are needed
        else:
            for client in [client for client, _ in sent if client not in heard]:
                inbox.reject(client, f"no reply within the deadline of {self.deadline:g} s")
        self._opened, self._sent = None, []
        return self.server.close(opened)

    def evaluate(self, grid: Grid, config: ConfigRecord) -> dict[int, Score]:
        """Let every connected node evaluate the current model with its client's own part; they send numbers only."""
        server, registry, post = self.server, self._known(grid), Post[Instruction](grid)
        training, state = server.training, server.state
        registry.refresh()
        x = shared_slots(training, state.slots.only("x"))
        buffers = shared_buffers(training, state.buffers)
        arrays = array_records(encode(x, buffers, training.division.shared, server.layout))
        asked = [(server.instruction(client), node) for client, node in sorted(registry.nodes().items())]
        messages = [
            (one, Message(instruct(arrays, one, config), node, MessageType.EVALUATE, ttl=self.deadline + GRACE))
            for one, node in asked
        ]
        post.send(messages)
        scores: dict[int, Score] = {}
        for instruction, reply in post.until(time.monotonic() + self.deadline, self.poll):
            try:
                if reply.has_error():
                    raise Rejected(failure(reply))
                scores[instruction.client] = score_in(reply.content, instruction)
            except Rejected as reason:
                log.warning("client %d was not evaluated: %s", instruction.client, reason)
        return dict(sorted(scores.items()))

    def read(self, client: int, reply: Message, expected: Expected) -> Reply:
        """The reply in a message from the node of a client; raises `Rejected`."""
        if reply.has_error():
            raise Rejected(failure(reply))
        try:
            found = reply_in(reply.content, expected, self.server.layout)
        except Rejected:
            raise
        except Exception as error:  # arbitrary content may raise any error
            raise Rejected(f"its reply cannot be read: {type(error).__name__}: {error}") from error
        if found.client != client:
            raise Rejected(f"its node answered as client {found.client}")
        return found

    def _known(self, grid: Grid) -> NodeRegistry:
        if self._registry is None or self._registry.grid is not grid:
            self._registry = NodeRegistry(grid, self.server.contract, self.server.population, self.poll)
        return self._registry
