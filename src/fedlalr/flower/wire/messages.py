"""Sending messages and taking replies in, one at a time, until a deadline."""

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
"""Beside Flower's codes, that of a reply which Flower itself could not read."""
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RecursionError, DecodeError)
"""What Flower runs into where the parts of a message do not make one. What a network or a disk does is not in it."""

_REASONS = {
    _UNREADABLE: "Flower cannot read its reply",
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its node cannot load the client app",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its client app raised",
    ErrorCode.MESSAGE_UNAVAILABLE: "its message is no longer available",
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its reply is no longer available",
    ErrorCode.NODE_UNAVAILABLE: "its node is gone",
    ErrorCode.MOD_FAILED_PRECONDITION: "a modifier of its client app refused the message",
    ErrorCode.INVALID_FAB: "its node does not trust the app",
    ErrorCode.CLIENT_APP_CRASHED: "its client app's process died",
}
_LONGEST_REASON = 300


class Post(Generic[Key]):
    """Messages under way, each under a key of the caller's. A reply is found by the message it answers.

    Replies are asked for one by one: Flower hands over whole messages, all that are ready, and a cohort of them would
    have to fit in memory.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.waiting: dict[str, Key] = {}
        self._sent: dict[str, Message] = {}

    def send(self, messages: Sequence[tuple[Key, Message]]) -> list[Key]:
        """Push messages; gives the keys of those that Flower did not take."""
        if not messages:
            return []
        ids = list(self.grid.push_messages([message for _, message in messages]))
        ids += [""] * (len(messages) - len(ids))
        refused = []
        for (key, message), message_id in zip(messages, ids, strict=True):
            if message_id:
                self.waiting[message_id], self._sent[message_id] = key, message
            else:
                refused.append(key)
        return refused

    def arrivals(self) -> Iterator[tuple[Key, Message]]:
        """The replies that are in, each with its key. What answers another message than it was pulled for is not."""
        for message_id, key in list(self.waiting.items()):
            for message in self._pull(message_id):
                if message.metadata.reply_to_message_id == message_id:
                    self.waiting.pop(message_id, None)
                    self._sent.pop(message_id, None)
                    yield key, message

    def _pull(self, message_id: str) -> Iterable[Message]:
        """The reply to a message, if it is in; an error in its place where a node sent what cannot be put together."""
        try:
            return list(self.grid.pull_messages([message_id]))
        except _MALFORMED as error:
            found = Error(_UNREADABLE, f"{type(error).__name__}: {error}")
            return [Message(found, reply_to=self._sent[message_id])]

    def until(self, deadline: float, poll: float) -> Iterator[tuple[Key, Message]]:
        """Replies as they come in, until all are there or the monotonic clock reaches the deadline."""
        while self.waiting:
            yield from self.arrivals()
            left = deadline - time.monotonic()
            if not self.waiting or left <= 0:
                return
            time.sleep(min(poll, left))


def failure(message: Message) -> str:
    """Why a client did not answer, from an error reply: Flower's reason with the last line of what it reports."""
    error = message.error
    lines = [line.strip() for line in (error.reason or "").splitlines() if line.strip()]
    what = _REASONS.get(error.code, f"Flower reports error {error.code}")
    return f"{what}: {lines[-1]}"[:_LONGEST_REASON] if lines else what
