"""The report on localhost, rendered again as runs progress.

Only the page itself is served, to pages of the same origin. The `Host` header is checked, because another site can give
its own name the address 127.0.0.1 and would then count as the same origin.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from fedlalr.config import Config, ConfigError
from fedlalr.config.loading import CONFIG_FILE
from fedlalr.config.run_dir import SUMMARY_FILE
from fedlalr.federation.storage.journal import METRICS_FILE
from fedlalr.federation.trajectory import TRAJECTORY_FILE
from fedlalr.report.html import page
from fedlalr.report.partitions import PartitionView, view_partitions
from fedlalr.report.runs import ReportedRun, read_run, runs_below

LOOPBACK = "127.0.0.1"
_FILES = (METRICS_FILE, SUMMARY_FILE, CONFIG_FILE, TRAJECTORY_FILE)

Stamp = tuple[tuple[int, int] | None, ...]
"""Time of change and size of each file of a run."""


class LiveReport:
    """The page about the runs in some places: rendered if a file has changed, and only changed runs are read again."""

    def __init__(self, places: Sequence[Path]) -> None:
        self.places = places
        self._lock = threading.Lock()
        self._seen: dict[Path, dict[Path, Stamp]] = {}
        self._page = ""
        self._read: dict[tuple[Path, Stamp], ReportedRun | str] = {}
        self._configs: list[Config | None] = []
        self._partitions: list[PartitionView] = []

    def page(self) -> str:
        """The current page. Runs that cannot be read are named on it, with the reason."""
        with self._lock:
            seen = {place: {path: _stamp(path) for path in runs_below(place)} for place in self.places}
            if seen != self._seen:
                self._page = self._render(seen)
                self._seen = seen
            return self._page

    def _render(self, seen: Mapping[Path, Mapping[Path, Stamp]]) -> str:
        keys = dict.fromkeys(key for runs in seen.values() for key in runs.items())
        self._read = {key: self._read[key] if key in self._read else _read(key[0]) for key in keys}
        runs = [run for run in self._read.values() if isinstance(run, ReportedRun)]
        notes = [f"{place} contains no run yet." for place, found in seen.items() if not found]
        notes += [f"Not shown: {reason}" for reason in self._read.values() if isinstance(reason, str)]
        configs = [run.config for run in runs]
        if configs != self._configs:  # recomputing partitions takes seconds
            self._configs, self._partitions = configs, view_partitions(runs)
        return page(runs, partitions=self._partitions, live=True, notes=notes)


def _read(path: Path) -> ReportedRun | str:
    """A run, or the reason why it cannot be shown."""
    try:
        run = read_run(path)
        page([run], partitions=[])
    except (ConfigError, OSError) as error:
        return str(error)
    except Exception as error:  # a damaged file may have anything anywhere, and the other runs must be shown
        return f"the files in {path} are damaged: {type(error).__name__}: {error}"
    return run


def _stamp(path: Path) -> Stamp:
    return tuple(_version(path / name) for name in _FILES)


def _version(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class LiveServer(ThreadingTCPServer):
    """Serves the page about some places on localhost, at a port or at a free one."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, places: Sequence[Path], port: int | None = None) -> None:
        self.report = LiveReport(places)
        super().__init__((LOOPBACK, port or 0), _Handler)
        self.port: int = self.server_address[1]
        self.address = f"http://{LOOPBACK}:{self.port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore readers that left before their answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET / and nothing else."""

    server: LiveServer
    server_version, sys_version = "fedlalr", ""
    timeout = 30

    def do_GET(self) -> None:
        rejected = self._rejection()
        if rejected is not None:
            self._send(*rejected)
            return
        try:
            content = self.server.report.page()
        except Exception as error:  # the reader sees it, and the page is tried again
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
            return
        digest = f'"{hashlib.sha256(content.encode()).hexdigest()}"'
        if self.headers.get("If-None-Match") == digest:
            self._send(HTTPStatus.NOT_MODIFIED)
        else:
            self._send(HTTPStatus.OK, content, "html", digest)

    def _rejection(self) -> tuple[HTTPStatus, str] | None:
        """Why a request is rejected; None if it may be answered."""
        hosts = self.headers.get_all("Host") or []
        allowed = [f"{name}:{self.server.port}" for name in (LOOPBACK, "localhost")]
        if len(hosts) != 1 or hosts[0].lower() not in allowed:
            return HTTPStatus.MISDIRECTED_REQUEST, f"This page is only available at http://{allowed[0]}/."
        foreign = self.headers.get("Origin", f"http://{hosts[0]}") != f"http://{hosts[0]}"
        embedded = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if foreign or (embedded and self.headers.get("Sec-Fetch-Mode") != "navigate"):  # following a link is harmless
            return HTTPStatus.FORBIDDEN, "Other sites cannot read this page."
        return None if self.path == "/" else (HTTPStatus.NOT_FOUND, "There is only one page: /")

    def _send(self, status: HTTPStatus, content: str = "", kind: str = "plain", digest: str | None = None) -> None:
        body = content.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("X-Content-Type-Options", "nosniff")
        if digest is not None:
            self.send_header("ETag", digest)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: a page that stays open requests itself every few seconds."""
