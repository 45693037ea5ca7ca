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

    def __init__(self, node: int, until: float) -> None:
        self.node, self.until = os.getppid(), until
        """The process that starts relays lives as long as the node."""
        self.name = f"{self.node}-{node}"

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
        connection, pid = self._connect(setup)
        with connection, connection.makefile("rb") as stream:
            connection.settimeout(SILENCE)
            try:
                send(connection, request)
                while (found := receive(stream)).kind == BEAT:
                    if time.monotonic() > self.until:
                        self._kill(pid)
                        raise TrainerError(f"the node's trainer (process {pid}) did not finish in time and was ended")
            except TimeoutError:
                self._kill(pid)
                raise TrainerError(
                    f"the node's trainer (process {pid}) hung: no sign of life for {SILENCE:g} s. It was ended; the "
                    f"next message starts a new one"
                ) from None
            except (EOFError, ConnectionError):
                raise TrainerError(
                    f"the node's trainer (process {pid}) ended during its work; was it killed, or is memory short? The "
                    f"node's log may say more. The next message starts a new one"
                ) from None
        if found.kind == "error":
            raise TrainingFailed(found.text)
        return found

    def _connect(self, setup: dict[str, Any]) -> tuple[socket.socket, int]:
        """A connection to the trainer of this app, and its process id. Starts it, or replaces that of another app."""
        connection = self._dial()
        if connection is not None:
            running = json.loads(os.pread(self.lock, 4096, 0))
            if running["digest"] == setup["digest"]:
                return connection, running["pid"]
            connection.close()
            self._kill(running["pid"])  # idle, since the lock is ours
        pid = self._start(setup)
        connection = self._dial()
        if connection is None:
            raise TrainerError(f"the node's trainer (process {pid}) ended while it started; see the node's log")
        return connection, pid

    def _dial(self) -> socket.socket | None:
        """A connection, or None if no trainer listens."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(self._address)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        owner = peer(connection)
        if owner != os.getuid():
            connection.close()
            raise TrainerError(
                f"user {owner}, not this node's user {os.getuid()}, listens on {self.path / self.name}.sock; remove it"
            )
        return connection

    def _start(self, setup: dict[str, Any]) -> int:
        """Start a trainer that inherits the socket, so that it can be connected to at once; returns its process id."""
        self._unlink()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            inherited = {"listener": listener.fileno(), "folder": self.folder, "node": self.node, "name": self.name}
            process = subprocess.Popen(
                [sys.executable, "-m", "fedlalr.flower.client.trainer", json.dumps(setup | inherited)],
                stdin=subprocess.DEVNULL,
                pass_fds=(listener.fileno(), self.folder),
                start_new_session=True,
            )
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, json.dumps({"pid": process.pid, "digest": setup["digest"]}).encode(), 0)
        return process.pid

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
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
