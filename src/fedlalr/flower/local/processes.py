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
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str | Path], log: Path) -> None:
        """Start a process in a new session, so that Ctrl-C in a terminal does not reach it before us."""
        with log.open("ab") as output:
            self.started[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )

    def alive(self, name: str) -> bool:
        """Whether a process is still running."""
        return self.started[name].poll() is None

    def stop(self, patience: float = 5.0) -> None:
        """Terminate all processes, the last started first, and kill those left after some seconds."""
        for process in reversed(self.started.values()):
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
        for process in self.started.values():
            process.wait()
        self.started.clear()

    def members(self) -> list[int]:
        """The ids of all other running processes with the mark."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in PROC.glob("[0-9]*"):
            with suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0") and _state(entry) != "Z":
                    found.append(int(entry.name))
        return found

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.started.values() if process.poll() is None]


def _state(entry: Path) -> str:
    """The first field after the command's name, which may contain anything."""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
