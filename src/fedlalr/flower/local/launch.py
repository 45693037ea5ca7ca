"""A complete federation on this machine: a superlink, supernodes and a run, only on the loopback interface.

For demonstrations and tests. All files are in one folder, which the caller removes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sysconfig
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedlalr.flower.local.certificates import NodeKeys, ServerFiles, make_node_keys, make_server_files
from fedlalr.flower.local.processes import Processes

HOST = "127.0.0.1"
CONNECTION = "local"
START_TIMEOUT = 180.0
"""Maximum seconds for a process to start, on a busy machine."""


class FederationError(RuntimeError):
    """A process of the federation failed. The message ends with the last lines of its log."""


class LocalFederation:
    """A context manager: all processes that it started are stopped at the end."""

    def __init__(self, folder: Path, *, secure: bool = True) -> None:
        self.folder, self.secure = folder, secure
        self.port = free_port()
        self.home = folder / "flwr"
        self.scripts = Path(sysconfig.get_path("scripts"))
        self.processes = Processes(environment(self.home, self.scripts))
        self.certificates: ServerFiles | None = None
        """None in an insecure federation."""

    def __enter__(self) -> LocalFederation:
        self.home.mkdir(parents=True, exist_ok=True)
        if self.secure:
            self.certificates = make_server_files(self.folder / "certificates", [HOST, "localhost"])
        files = self.certificates
        connection = f'root-certificates = "{files.authority}"' if files else "insecure = true"
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{HOST}:{self.port}"\n'
            f"{connection}\n",
            encoding="utf-8",
        )
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            self.processes.stop()

    def start_superlink(self, *options: str | Path) -> None:
        """Start the superlink, with further options of its own, and wait until it answers."""
        command: list[str | Path] = [self.scripts / "flower-superlink", "--host", HOST, "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation", *options]
        if files := self.certificates:
            command += ["--ssl-ca-certfile", files.authority, "--ssl-certfile", files.certificate]
            command += ["--ssl-keyfile", files.key, "--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        self.processes.start("superlink", command, self.log("superlink"))
        deadline = time.monotonic() + START_TIMEOUT
        while not self._answers():
            if not self.processes.alive("superlink") or time.monotonic() > deadline:
                raise FederationError(f"superlink did not start:\n{self.tail('superlink')}")
            time.sleep(0.2)

    def register(self, node: int) -> NodeKeys:
        """Create a key pair for a node, and register it with the superlink."""
        keys = make_node_keys(self.folder / "keys", f"node-{node}")
        self.flwr("supernode", "register", str(keys.public), CONNECTION)
        return keys

    def start_node(self, node: int, config: Mapping[str, int | float | str], *, keys: NodeKeys | None = None) -> None:
        """Start a supernode. A secure federation rejects nodes without registered keys."""
        command: list[str | Path] = [self.scripts / "flower-supernode", "--superlink", f"{HOST}:{self.port}"]
        command += ["--host", HOST, "--port", str(free_port()), "--node-config", as_toml(config)]
        if self.certificates:
            command += ["--root-certificates", self.certificates.authority]
            command += ["--auth-supernode-private-key", keys.private] if keys is not None else []
        else:
            command += ["--insecure"]
        self.processes.start(f"node-{node}", command, self.log(f"node-{node}"))

    def submit(self, app: Path, config: Mapping[str, int | float | str], name: str = "run") -> None:
        """Start a run of an app. The process `name` streams the run's log and ends with the run."""
        command: list[str | Path] = [self.scripts / "flwr", "run", app, CONNECTION, "--stream"]
        command += ["--run-config", as_toml(config)] if config else []
        self.processes.start(name, command, self.log(name))

    def status(self) -> list[dict[str, Any]]:
        """The superlink's runs, newest first."""
        output = self.flwr("list", CONNECTION, "--format", "json")
        answer = json.loads(output)
        if "runs" not in answer:
            raise FederationError(f"flwr list did not return the runs: {output}")
        found: list[dict[str, Any]] = answer["runs"]
        return found

    def completed(self) -> bool:
        """Whether the newest run completed. Its records do not show it: they may be from an earlier run."""
        return bool(self.status()[0]["status"] == "finished:completed")

    def wait_for(self, name: str, patience: float, progress: Callable[[], object]) -> int:
        """Wait for a process to end, and return its exit code; fails after `patience` seconds without progress."""
        process = self.processes.started[name]
        since, seen = time.monotonic(), progress()
        while process.poll() is None:
            if (now := progress()) != seen:
                since, seen = time.monotonic(), now
            if time.monotonic() - since > patience:
                raise FederationError(f"{name} made no progress for {patience:g} s.\n{self.tail(name)}")
            time.sleep(0.2)
        return process.returncode

    def flwr(self, *arguments: str) -> str:
        """Run Flower's command line, and return its output."""
        done = subprocess.run(
            [str(self.scripts / "flwr"), *arguments],
            env=self.processes.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT,
            check=False,
        )
        if done.returncode:
            raise FederationError(f"flwr {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def log(self, name: str) -> Path:
        """The log file of a process."""
        return self.folder / f"{name}.log"

    def tail(self, name: str, lines: int = 30) -> str:
        """The last lines of the log of a process."""
        path = self.log(name)
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def _answers(self) -> bool:
        scheme, files = "https" if self.secure else "http", self.certificates
        trusted = ssl.create_default_context(cafile=files.authority) if files else None
        direct = urllib.request.ProxyHandler({})
        opener = urllib.request.build_opener(direct, urllib.request.HTTPSHandler(context=trusted))
        try:
            with opener.open(f"{scheme}://{HOST}:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def environment(home: Path, scripts: Path) -> dict[str, str]:
    """The environment of Flower's processes: no telemetry, update checks, installations or proxies."""
    ours = {
        "FLWR_HOME": str(home),
        "XDG_RUNTIME_DIR": str(home),  # for the sockets of trainers, which then leave no files behind
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "NO_COLOR": "1",
    }
    kept = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {**kept, **ours}


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore a second Ctrl-C while processes are being stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def free_port() -> int:
    """A free port on the loopback interface."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port


def as_toml(values: Mapping[str, int | float | str]) -> str:
    """Settings in the format of Flower's command line.

    >>> as_toml({"partition-id": 0, "warm": False, "state-dir": "/var/lib/state"})
    "partition-id=0 warm=false state-dir='/var/lib/state'"
    """
    return " ".join(f"{name}={_toml(value)}" for name, value in values.items())


def _toml(value: int | float | str) -> str:
    if not isinstance(value, str):
        return str(value).lower()  # false, not False
    if "'" not in value:
        return f"'{value}'"
    if '"' in value or "\\" in value:
        raise ValueError(
            f"Flower's command line does not support {value!r}: it contains an apostrophe and a quote or backslash"
        )
    return f'"{value}"'
