"""Send messages and receive replies, one at a time, until a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, TypeVar

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

Key = TypeVar("Key")

_UNREADABLE = -1
"""An error code in addition to Flower's, for a reply that Flower could not read."""
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError, DecodeError)
"""Errors that Flower raises for malformed messages. Network and disk errors are not among them."""

_REASONS = {
    _UNREADABLE: "Flower cannot read its reply",
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its node cannot load the client app",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its client app raised an error",
    ErrorCode.MESSAGE_UNAVAILABLE: "its message is no longer available",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply is no longer available",
    ErrorCode.NODE_UNAVAILABLE: "its node is not available",
    ErrorCode.MOD_FAILED_PRECONDITION: "a mod of its client app rejected the message",
    ErrorCode.INVALID_FAB: "its node does not trust the app",
    ErrorCode.CLIENT_APP_CRASHED: "its client app's process died",
}
_LONGEST_REASON = 300


class Post(Generic[Key]):
    """Pending messages by a key of the caller. A reply is matched to the message it answers.

    Replies are pulled one by one: pulling all at once would return all replies that are ready, and a whole cohort of
    them would have to fit into memory.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, Key] = {}
        self._sent: dict[str, Message] = {}

    def send(self, messages: Sequence[tuple[Key, Message]]) -> list[Key]:
        """Push messages; returns the keys of those that Flower did not accept."""
        if not messages:
            return []
        ids = list(self.grid.push_messages([message for _, message in messages]))
        ids += [""] * (len(messages) - len(ids))
        rejected = []
        for (key, message), message_id in zip(messages, ids, strict=True):
            if message_id:
                self.waiting[message_id], self._sent[message_id] = key, message
            else:
                rejected.append(key)
        return rejected

    def arrivals(self) -> Iterator[tuple[Key, Message]]:
        """The replies that have arrived, with their keys. Replies to other messages than the pulled one are dropped."""
        for message_id, key in list(self.waiting.items()):
            for message in self._pull(message_id):
                if message.metadata.reply_to_message_id == message_id:
                    self.waiting.pop(message_id, None)
                    self._sent.pop(message_id, None)
                    yield key, message

    def _pull(self, message_id: str) -> Iterable[Message]:
        """The reply to a message, if it has arrived; an error reply if the node sent a malformed message."""
        try:
            return list(self.grid.pull_messages([message_id]))
        except _MALFORMED as error:
            found = Error(_UNREADABLE, f"{type(error).__name__}: {error}")
            return [Message(found, reply_to=self._sent[message_id])]

    def until(self, deadline: float, poll: float) -> Iterator[tuple[Key, Message]]:
        """Replies as they arrive, until all are there or the monotonic clock reaches the deadline."""
        while self.waiting:
            yield from self.arrivals()
            left = deadline - time.monotonic()
            if not self.waiting or left <= 0:
                return
            time.sleep(min(poll, left))


def failure(message: Message) -> str:
    """Why a client failed, from an error reply: Flower's reason and the last line of its report."""
    error = message.error
    lines = [line.strip() for line in (error.reason or "").splitlines() if line.strip()]
    what = _REASONS.get(error.code, f"Flower reports error {error.code}")
    return f"{what}: {lines[-1]}"[:_LONGEST_REASON] if lines else what
