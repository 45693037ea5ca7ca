"""A grid whose nodes are in this process: real messages and client apps, without processes or a network."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

RUN = 1
Tamper = Callable[[Message, Message], Message | list[Message] | None]
"""Maps a message and its reply to the replies that arrive: the same one, another, several or none."""


@dataclass
class Node:
    """A supernode: its app, its configuration, and how it changes its replies."""

    app: ClientApp
    config: dict[str, Any]
    tamper: Tamper | None = None
    run_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class InProcessGrid(Grid):
    """Runs a client app when its message is pushed; replies wait until they are pulled."""

    nodes: dict[int, Node]
    backwards: bool = False
    """Return replies in the reverse order of the requests."""
    replies: dict[str, list[Message]] = field(default_factory=dict)
    pulled: list[int] = field(default_factory=list)
    """The number of messages returned by each pull."""
    trained: list[int] = field(default_factory=list)
    """Nodes that were sent training messages."""
    sent: list[Message] = field(default_factory=list)
    """Every message to a node."""
    states: dict[int, RecordDict] = field(default_factory=dict)
    """What Flower keeps for each node between the messages of a run."""

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN, 1, 1

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            ids.append(message.object_id)
            self.sent.append(message)
            self.replies[message.object_id] = self._answer(message)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = list(message_ids)
        if self.backwards and self._held_back(ids):
            return []
        found = [reply for message_id in ids for reply in self.replies.pop(message_id, [])]
        self.pulled.append(len(found))
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(list(messages)))

    def _held_back(self, ids: list[str]) -> bool:
        """Whether the reply to a later message is still waiting."""
        waiting = [message_id for message_id, replies in self.replies.items() if replies]
        return bool(waiting) and waiting[-1] not in ids

    def _answer(self, message: Message) -> list[Message]:
        node_id = message.metadata.dst_node_id
        node = self.nodes.get(node_id)
        if node is None:
            return [Message(Error(ErrorCode.NODE_UNAVAILABLE, "Node Unavailable"), reply_to=message)]
        if message.metadata.message_type == "train":
            self.trained.append(node_id)
        context = Context(RUN, node_id, node.config, self.states.get(node_id, RecordDict()), node.run_config)
        try:
            reply = node.app(message, context)
        except Exception as error:
            return [Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"Trace\n{error}"), reply_to=message)]
        finally:
            self.states[node_id] = context.state
        if node.tamper is None or message.metadata.message_type != "train":
            return [reply]
        changed = node.tamper(message, reply)
        return changed if isinstance(changed, list) else [] if changed is None else [changed]


def to_npy(array: np.ndarray) -> bytes:
    """An array as the bytes of an npy file."""
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()
