"""Where a node's trainer is reached, how it is started and replaced. Only for Linux.

A node has one trainer. Its socket and its lock are in a folder that only the node's user can enter. The lock file has
the trainer's process id and the digest of the app that it runs. A relay holds the lock while it uses the trainer.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlalr.flower.client.frames import BEAT, Frame, receive, send

SILENCE = 300.0
"""Seconds without a sign of life after which a trainer counts as hung."""


class TrainerError(RuntimeError):
    """The node's trainer cannot be used, ended or did not answer."""


class TrainingFailed(RuntimeError):
    """The trainer raised an error; its traceback is in the node's log."""


class Station:
    """The place where a node's trainer is reached. A context manager: holds the lock, until some time at most."""

    def __init__(self, node: int, until: float, starter: int | None = None) -> None:
        self.until, self.starter = until, starter or os.getppid()
        """The process that starts relays lives as long as the node."""
        self.name = f"{self.starter}-{node}"

    def __enter__(self) -> Station:
        self.path, self.folder = open_folder()
        try:
            self.lock = self._locked()
        except BaseException:
            os.close(self.folder)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.lock)
        os.close(self.folder)

    def ask(self, setup: dict[str, Any], request: Frame) -> Frame:
        """The trainer's reply; raises `TrainingFailed` if it raised an error, or `TrainerError`."""
        try:
            with self._connect(setup) as connection, connection.makefile("rb") as stream:
                send(connection, request)
                while (found := receive(stream)).kind == BEAT:
                    connection.settimeout(self._patience)
        except TimeoutError:
            self._kill()
            late, hung = "did not finish before its message expired", f"hung: no sign of life for {SILENCE:g} s"
            what = late if time.monotonic() >= self.until else hung
            raise self._error(f"{what}. It was ended; the next message starts a new one") from None
        except (EOFError, ConnectionError):
            raise self._error(
                "ended during its work; was it killed, or is memory short? The node's log may say more. The next "
                "message starts a new one"
            ) from None
        if found.kind == "error":
            raise TrainingFailed(found.text)
        return found

    def _connect(self, setup: dict[str, Any]) -> socket.socket:
        """A connection to the trainer of this app. Starts it, or replaces that of another app."""
        connection = self._dial()
        if connection is not None:
            if self._running["digest"] == setup["digest"]:
                return connection
            connection.close()
            self._kill()  # it is idle, since the lock is ours
        self._start(setup)
        connection = self._dial()
        if connection is None:
            raise self._error("ended while it started; the node's log says why")
        return connection

    def _dial(self) -> socket.socket | None:
        """A connection to a trainer that has greeted, or None if there is none."""
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(self._patience)
        try:
            connection.connect(self._address)
            if (owner := peer(connection)) != os.getuid():
                place = self.path / f"{self.name}.sock"
                raise TrainerError(f"user {owner}, not this node's user {os.getuid()}, listens on {place}; remove it")
            with connection.makefile("rb") as stream:
                receive(stream)
        except (FileNotFoundError, ConnectionError, EOFError):  # none, or it has just ended
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise
        return connection

    def _start(self, setup: dict[str, Any]) -> None:
        """Start a trainer. It inherits the socket, so that it can be connected to at once."""
        self._unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            inherited = {"listener": listener.fileno(), "folder": self.folder, "node": self.starter, "name": self.name}
            process = subprocess.Popen(
                [sys.executable, "-m", "fedlalr.flower.client.trainer", json.dumps(setup | inherited)],
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(), self.folder),
                start_new_session=True,
            )
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps({"pid": process.pid, "digest": setup["digest"]}).encode(), 0)

    @property
    def _running(self) -> dict[str, Any]:
        """The trainer that was started last: its process id, and the digest of its app."""
        found: dict[str, Any] = json.loads(os.pread(self.lock, 4096, 0))
        return found

    @property
    def _patience(self) -> float:
        """Seconds to wait for the next sign of life."""
        return max(0.001, min(SILENCE, self.until - time.monotonic()))

    def _error(self, what: str) -> TrainerError:
        return TrainerError(f"the node's trainer (process {self._running['pid']}) {what}")

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._running["pid"], signal.SIGKILL)
        self._unlink()

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(f"{self.name}.sock", dir_fd=self.folder)

    @property
    def _address(self) -> str:
        return f"/proc/self/fd/{self.folder}/{self.name}.sock"  # a path of its own may be too long for a socket

    def _locked(self) -> int:
        while True:
            lock = os.open(f"{self.name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self.folder)
            if try_lock(lock) and os.fstat(lock).st_nlink:  # a trainer that ends removes the file
                return lock
            os.close(lock)
            if time.monotonic() > self.until:
                raise TrainerError("the node's trainer was busy with another message until this one expired")
            time.sleep(0.05)


def open_folder() -> tuple[Path, int]:
    """The folder of the sockets of this user's trainers, and its descriptor; nobody else can enter it."""
    user = os.getuid()
    path = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"fedlalr-{user}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise TrainerError(f"{path}, the folder for the trainer's socket, cannot be opened: {error.strerror}") from None
    found = os.fstat(folder)
    if found.st_uid != user or found.st_mode & 0o077:
        os.close(folder)
        raise TrainerError(
            f"{path} must belong to user {user} alone (mode 700), but belongs to user {found.st_uid} with mode "
            f"{found.st_mode & 0o777:o}; remove it, or set XDG_RUNTIME_DIR to a folder of your own"
        )
    return path, folder


def peer(connection: socket.socket) -> int:
    """The user at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def try_lock(lock: int) -> bool:
    """Lock a file for this process, unless another holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
