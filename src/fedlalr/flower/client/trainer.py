"""A node's trainer: a process that imports the app once, keeps model and data, and answers one relay after another.

    python -m fedlalr.flower.client.trainer SETUP        started by a relay, with the socket

It ends with the node, when its relay has gone in mid-work, and after an hour without work.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context

from fedlalr.flower.client.frames import BEAT, Frame, receive, send
from fedlalr.flower.client.named import Names
from fedlalr.flower.client.station import peer, try_lock

if TYPE_CHECKING:
    from fedlalr.flower.client.node import NodeClient

PULSE = 5.0
"""Seconds between signs of life."""
IDLE = 3600.0
"""Seconds without work after which a trainer ends, and frees its memory."""


class Trainer:
    """Answers relays, one at a time."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.listener = socket.socket(fileno=setup["listener"])
        self.folder, self.name, self.digest = setup["folder"], setup["name"], setup["digest"]
        self.names, self.state_dir = Names(**setup["names"]), setup["state_dir"]
        self._client: NodeClient | None = None

    def serve(self, idle: float = IDLE) -> None:
        """Answer relays until there is nothing to do for `idle` seconds."""
        self.listener.settimeout(idle)
        while True:
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                if self._leave():
                    return
                continue
            self.welcome(connection)

    def welcome(self, connection: socket.socket) -> None:
        """Answer one relay, if it belongs to this user."""
        with connection, suppress(EOFError, ConnectionError):  # it has gone; the next one connects again
            connection.settimeout(None)
            if peer(connection) == os.getuid():
                send(connection, Frame(BEAT))  # a greeting, so that the relay knows that this trainer is there
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        with connection.makefile("rb") as stream:
            request = receive(stream)
        assert request.context is not None
        with signs_of_life(connection):
            try:
                content = self._client_of(request.context).answer(request.kind, request.content, request.context)
                reply = Frame("reply", "", content, request.context)
            except Exception as error:
                traceback.print_exc()
                reply = Frame("error", f"{type(error).__name__}: {error}")
        send(connection, reply)

    def _client_of(self, context: Context) -> NodeClient:
        """The client of this node, whose functions are called once per run."""
        if self._client is None:
            from fedlalr.flower.client.node import NodeClient

            found = {argument: once_per_run(part) for argument, part in self.names.load().items()}
            if self.names.digest(context) != self.digest:
                raise RuntimeError("the app's files changed while the node's trainer imported them")
            self._client = NodeClient(**found, state_dir=self.state_dir)
        return self._client

    def _leave(self) -> bool:
        """Remove the socket and the lock, unless a relay is about to connect."""
        lock = os.open(f"{self.name}.lock", os.O_RDWR | os.O_CREAT, 0o600, dir_fd=self.folder)
        free = try_lock(lock)
        if free:
            self.remove_files()
        os.close(lock)
        return free

    def remove_files(self) -> None:
        """Leave no file behind."""
        for suffix in ("sock", "lock"):
            with suppress(OSError):
                os.unlink(f"{self.name}.{suffix}", dir_fd=self.folder)


def once_per_run(part: Any) -> Any:
    """A function of the context that remembers its result for the run; anything else as it is."""
    if not callable(part):
        return part
    known: dict[int, Any] = {}

    def remembered(context: Context) -> Any:
        if context.run_id not in known:
            known.clear()
            known[context.run_id] = part(context)
        return known[context.run_id]

    return remembered


@contextmanager
def signs_of_life(connection: socket.socket) -> Iterator[None]:
    """Send a beat every few seconds. Ends this process if the relay has gone: nobody waits for the result."""
    done, mine = socket.socketpair()

    def watch() -> None:
        waiting = select.poll()
        waiting.register(connection, 0)  # only hang-ups are reported
        waiting.register(mine, 0)
        while not (events := waiting.poll(PULSE * 1000)):
            send(connection, Frame(BEAT))
        if mine.fileno() not in dict(events):
            os._exit(1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.close()
        thread.join()
        mine.close()


def end_with(pid: int, clean_up: Callable[[], None]) -> None:
    """End this process, whatever it is doing, when another one has ended."""
    started = _started(pid)

    def watch() -> None:
        while started is not None and _started(pid) == started:
            time.sleep(0.5)
        clean_up()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def _started(pid: int) -> str | None:
    """When a process started, by which it differs from a later one with the same id; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def main() -> None:
    """Serve with what the relay gave."""
    setup = json.loads(sys.argv[1])
    sys.path[:] = setup["path"]
    trainer = Trainer(setup)
    end_with(setup["node"], trainer.remove_files)
    trainer.serve()


if __name__ == "__main__":
    main()
