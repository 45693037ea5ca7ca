"""Our own processes: started with a mark in their environment, found by it, stopped one by one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "FEDLALR_FEDERATION"
PROC = Path("/proc")


class Processes:
    """A family of processes. Stopping it also stops their children, even those that left their parent's group.

    Children are found under /proc. Without it (macOS), Flower's child processes notice that their parent has ended.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.mark = secrets.token_hex(16)
        self.environment = {**environment, MARK: self.mark}
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
        """Start a process in a new session, so that Ctrl-C in a terminal does not reach it before us."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        self._started[name] = process
        return process

    def started(self, name: str) -> subprocess.Popen[bytes]:
        """A process by its name."""
        return self._started[name]

    def alive(self, name: str) -> bool:
        """Whether a process is still running."""
        return name in self._started and self._started[name].poll() is None

    def stop(self, patience: float = 5.0) -> None:
        """Terminate all processes, the last started first, and kill those left after some seconds."""
        for process in reversed(self._started.values()):
            with suppress(ProcessLookupError):
                process.terminate()
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline and (self.members() or self._running()):
            time.sleep(0.1)
        for _ in range(50):  # a process may start another during the search
            left = self.members()
            for pid in [*left, *(process.pid for process in self._running())]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not left:
                break
            time.sleep(0.1)
        for process in self._started.values():
            process.wait()
        self._started.clear()

    def members(self) -> list[int]:
        """The ids of all other running processes with the mark."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for pid in _pids():
            with suppress(OSError):
                if wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0") and _state(pid) != "Z":
                    found.append(pid)
        return found

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._started.values() if process.poll() is None]


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()] if PROC.is_dir() else []


def _state(pid: int) -> str:
    """The first field after the command's name, which may contain anything."""
    return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
