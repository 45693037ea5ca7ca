"""Which node serves which client, as announced by the nodes. A reconnecting node gets a new id; clients keep theirs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedlalr.flower.wire.messages import Post, failure
from fedlalr.flower.wire.records import FACTS

log = logging.getLogger("flwr.fedlalr")

ASK_AGAIN = 15.0
"""Seconds until a node that could not announce its client is asked again."""
QUESTION_LIFETIME = 600.0


@dataclass(frozen=True)
class Announcement:
    """A node's client and settings, as announced by the node."""

    client: int
    contract: str


class NodeRegistry:
    """Asks every connecting node once for its client, and knows which clients can be reached.

    If two nodes announce the same client, the first is used until it disconnects. Announcements are trusted: Flower's
    node authentication decides who may connect.
    """

    def __init__(self, grid: Grid, contract: str, population: int, poll: float = 1.0) -> None:
        self.grid, self.contract, self.population, self.poll = grid, contract, population, poll
        self._post: Post[int] = Post(grid)
        self._announced: dict[int, Announcement] = {}
        self._silent: dict[int, tuple[float, str]] = {}
        """Nodes that could not answer: when to ask again, and the reason."""
        self._given_up: set[int] = set()
        """Clients that did not appear while a round waited for them."""

    def nodes(self) -> dict[int, int]:
        """Client → node, for connected nodes that may take part."""
        found: dict[int, int] = {}
        for node, said in self._announced.items():
            if said.contract == self.contract and 0 <= said.client < self.population:
                found.setdefault(said.client, node)
        return found

    def reason(self, client: int) -> str:
        """Why a client cannot be reached."""
        if any(said.client == client for said in self._announced.values()):
            return "its node uses other settings, another method or another module than the server"
        silent = "; ".join(f"node {node}: {why}" for node, (_, why) in self._silent.items())
        return f"no connected node serves it{f' ({silent})' if silent else ''}"

    def wait_for(self, clients: Iterable[int], at_least: int, deadline: float) -> dict[int, int]:
        """Client → node, once all the clients can be reached or the monotonic clock reaches the deadline.

        A client that did not appear is not waited for again until it has connected, unless there would be too few
        clients without it.
        """
        wanted = set(clients)
        logged = False
        while True:
            self.refresh()
            present = {client: node for client, node in self.nodes().items() if client in wanted}
            self._given_up -= present.keys()
            missing = wanted - present.keys()
            left = deadline - time.monotonic()
            enough = len(present) >= at_least
            if (enough and missing <= self._given_up) or left <= 0:
                self._given_up |= missing
                return present
            if not logged:
                log.info("waiting up to %.0f s for the nodes of clients %s", left, _listed(sorted(missing)))
                logged = True
            time.sleep(min(self.poll, left))

    def refresh(self) -> None:
        """Update the connected nodes, ask new ones for their client, and process answers."""
        connected = list(self.grid.get_node_ids())
        for node in [node for node in self._announced if node not in connected]:
            log.info("node %d of client %d disconnected", node, self._announced.pop(node).client)
        for node in [node for node in self._silent if node not in connected]:
            del self._silent[node]
        waiting = set(self._post.waiting.values())
        now = time.monotonic()
        due = [
            node
            for node in connected
            if node not in self._announced and node not in waiting and self._silent.get(node, (now, ""))[0] <= now
        ]
        asked = RecordDict({FACTS: ConfigRecord({"contract": self.contract})})
        for node in self._post.send(
            [(node, Message(asked, node, MessageType.QUERY, ttl=QUESTION_LIFETIME)) for node in due]
        ):
            self._silent[node] = (now + ASK_AGAIN, "Flower did not accept the message")
        for node, reply in self._post.arrivals():
            self._take(node, reply)

    def _take(self, node: int, reply: Message) -> None:
        said = _announced(reply)
        if isinstance(said, str):
            self._silent[node] = (time.monotonic() + ASK_AGAIN, said)
            log.warning("node %d did not announce its client: %s", node, said)
            return
        client, before = said.client, self.nodes().get(said.client)
        self._silent.pop(node, None)
        self._announced[node] = said
        if not 0 <= client < self.population:
            log.warning(
                "node %d serves client %d, but clients are numbered from 0 to %d", node, client, self.population - 1
            )
        elif said.contract != self.contract:
            log.warning("node %d of client %d is ignored: %s", node, client, self.reason(client))
        elif before is not None:
            log.warning(
                "node %d serves client %d, like node %d: it is used once that node disconnects", node, client, before
            )
        else:
            log.info("node %d serves client %d", node, client)


def _announced(reply: Message) -> Announcement | str:
    """A node's answer, or why there is none."""
    if reply.has_error():
        return failure(reply)
    try:
        facts = reply.content.config_records[FACTS]
        client, contract = facts["client"], facts["contract"]
    except Exception:  # arbitrary content may raise any error
        return "its answer cannot be read"
    if isinstance(client, bool) or not isinstance(client, int) or not isinstance(contract, str):
        return "its answer cannot be read"
    return Announcement(client, contract)


def _listed(clients: list[int]) -> str:
    shown = ", ".join(map(str, clients[:10]))
    return f"{shown} and {len(clients) - 10} more" if len(clients) > 10 else shown
