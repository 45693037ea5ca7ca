"""Downloads arrive whole or not at all, twice at once or after a crash, and say what went wrong."""

import dataclasses
import hashlib
import http.server
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fedlalr.common.files import written_aside
from fedlalr.data import fetch
from fedlalr.data.fetch import DataCorrupt, Fact, Progress, RouteFailed
from fedlalr.data.sources import packages
from fedlalr.data.sources.rawdata import Arrays
from fedlalr.data.sources.registry import SOURCES
from fedlalr.data.sources.source import Route
from fedlalr.data.sources.source import fetch as fetch_source

CONTENT = bytes(range(256)) * 10_000
SIZE = len(CONTENT)
FACT = Fact(SIZE, "sha256", hashlib.sha256(CONTENT).hexdigest())


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/silent":
            time.sleep(2)
            return
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path not in ("/unsized", "/endless"):
            self.send_header("Content-Length", {"/larger": str(30 << 30), "/odd": "many"}.get(self.path, f"{SIZE}"))
        self.end_headers()
        if self.path in ("/larger", "/endless"):
            with suppress(ConnectionError):  # the client goes away
                while True:
                    self.wfile.write(CONTENT)
            return
        if self.path == "/breaks":
            self.wfile.write(CONTENT[:300_000])
        elif self.path == "/other":
            self.wfile.write(CONTENT[::-1])
        else:
            self.wfile.write(CONTENT)

    do_HEAD = do_GET  # noqa: N815 (the server's name)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.parametrize("page", ["whole", "unsized", "odd"])
def test_a_download_is_whole_and_reports_its_progress(server: str, page: str, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = fetch.download(f"{server}/{page}", tmp_path / "file", FACT, lambda *step: seen.append(step))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (f"downloading {page}", len(CONTENT), len(CONTENT))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("breaks", "ended after 300,000 of 2,560,000"),
        ("other", "gave a wrong file"),
        ("missing", "Not Found"),
        ("larger", "gives 32,212,254,720 bytes, but 2,560,000 are expected"),
        ("endless", "gives more than the 2,560,000 bytes that are expected"),
    ],
)
def test_a_bad_download_leaves_the_old_file_and_nothing_else(
    server: str, page: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(RouteFailed, match=reason):
        fetch.download(f"{server}/{page}", tmp_path / "file", FACT)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("page", "reason"),
    [("larger", "bytes, but at most 3,000,000 are expected"), ("endless", "more than the 3,000,000 bytes that")],
)
def test_a_download_of_unknown_size_has_a_limit(
    server: str, page: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "LARGEST", 3_000_000)
    with pytest.raises(RouteFailed, match=reason):
        fetch.download(f"{server}/{page}", tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_a_failed_download_can_be_repeated(server: str, tmp_path: Path) -> None:
    with pytest.raises(RouteFailed):
        fetch.download(f"{server}/breaks", tmp_path / "file", FACT)
    assert fetch.download(f"{server}/whole", tmp_path / "file", FACT).read_bytes() == CONTENT


def test_a_host_that_does_not_answer_is_given_up(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "CONNECT_SECONDS", 0.2)
    with pytest.raises(RouteFailed, match="timed out"):
        fetch.download(f"{server}/silent", tmp_path / "file")
    assert not fetch.reachable(f"{server}/silent")


def test_a_host_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/file"
        with pytest.raises(RouteFailed, match=r"cannot be read \(.*refused"):
            fetch.download(url, tmp_path / "file")
        assert not fetch.reachable(url)


def test_a_server_that_answers_with_an_error_is_reachable(server: str) -> None:
    assert fetch.reachable(f"{server}/missing")


def test_a_fact_refuses_another_size_and_another_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, reason in ((CONTENT[:-1], "2,559,999 bytes, but 2,560,000"), (CONTENT[::-1], "sha256 checksum")):
        path.write_bytes(content)
        with pytest.raises(DataCorrupt, match=f"{path}.*{reason}"):
            FACT.check_file(path)
        with pytest.raises(DataCorrupt, match=f"here.*{reason}"):
            FACT.check(content, "here")


def test_the_data_folder_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "mine"))
    assert fetch.data_folder() == tmp_path / "mine"
    monkeypatch.delenv("FEDLALR_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.data_folder().parts[-2:] == ("fedlalr", "data")


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot be made .*; set FEDLALR_DATA"):
        fetch.make_folder(tmp_path / "file" / "data")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write, not even root")
def test_a_folder_that_cannot_be_written_is_said_so_at_once() -> None:
    with (
        pytest.raises(OSError, match=r"/proc cannot be written .*; set FEDLALR_DATA"),
        fetch.locked(Path("/proc"), "mnist"),
    ):
        pass


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half() -> None:
        with written_aside(path) as aside:
            aside.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_one_holds_the_lock_and_the_other_is_told(tmp_path: Path) -> None:
    events: list[str] = []
    held = threading.Event()

    def first() -> None:
        with fetch.locked(tmp_path, "data"):
            held.set()
            time.sleep(0.3)
            events.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    held.wait()
    with fetch.locked(tmp_path, "data", lambda description, *_: events.append(description)):
        events.append("second")
    thread.join()
    assert events == ["waiting for another process that is fetching data", "first", "second"]


def test_a_lock_that_is_never_given_back_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "LOCK_SECONDS", 0.1)
    with (
        fetch.locked(tmp_path, "data"),
        pytest.raises(TimeoutError, match="another process has held"),
        fetch.locked(tmp_path, "data"),
    ):
        pass


def test_the_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".data-old.tmp").mkdir()
    (tmp_path / ".data-old.tmp" / "half").touch()
    (tmp_path / ".other-old.tmp").mkdir()
    with fetch.workspace(tmp_path, "data") as place:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([".other-old.tmp", place.name])
    assert [path.name for path in tmp_path.iterdir()] == [".other-old.tmp"]


def fetch_small(log: Path, dies: bool) -> None:
    """Fetch a data set that takes a moment, in a process of its own."""

    def get(folder: Path, progress: Progress | None) -> Arrays:
        with log.open("a") as file:
            file.write("fetched\n")
        (folder / "half").write_bytes(b"half")
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        return {"values": np.arange(1000)}

    source = dataclasses.replace(
        SOURCES["mnist"], name="small", check=lambda *_: None, routes=[Route("a slow host", get, "small")]
    )
    found = fetch_source(source)
    with log.open("a") as file:
        file.write(f"sum {found.arrays['values'].sum()}\n")


def run_fetches(count: int, log: Path, dies: bool = False) -> list[int | None]:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fetch_small, args=(log, dies)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    return [process.exitcode for process in processes]


def test_two_processes_at_once_fetch_once_and_both_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "data"))
    assert run_fetches(2, tmp_path / "log") == [0, 0]
    assert (tmp_path / "log").read_text() == "fetched\nsum 499500\nsum 499500\n"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [".small.lock", "small.safetensors"]


def test_a_killed_fetch_is_done_again_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    monkeypatch.setenv("FEDLALR_DATA", str(folder))
    assert run_fetches(1, tmp_path / "log", dies=True) == [-signal.SIGKILL]
    assert [path.name for path in folder.glob("*.safetensors")] == []
    assert len(list(folder.glob(".small-*.tmp"))) == 1
    assert run_fetches(1, tmp_path / "log") == [0]
    assert sorted(path.name for path in folder.iterdir()) == [".small.lock", "small.safetensors"]


def tool(script: str) -> list[str]:
    return ["sh", "-c", script]


def test_a_tool_reports_what_has_arrived(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    script = "head -c 5000 /dev/zero > file; sleep 0.5"
    packages.run(tool(script), tmp_path, "a tool", 4000, lambda *step: seen.append(step))
    assert (tmp_path / "file").stat().st_size == 5000
    assert seen[-1] == ("a tool", 4000, 4000)


def test_a_package_that_arrives_at_once_is_reported_too(tmp_path):
    seen = []
    packages.run(tool("printf 1234 > package"), tmp_path, "a tool", 4, lambda *step: seen.append(step))
    assert seen[-1] == ("a tool", 4, 4)


def test_a_failing_tool_is_quoted(tmp_path: Path) -> None:
    script = "echo hello; echo 'E: Unable to locate package'; exit 100"
    with pytest.raises(RouteFailed, match="a tool failed: E: Unable to locate package"):
        packages.run(tool(script), tmp_path, "a tool", None, None)


def test_a_tool_that_gets_nothing_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "QUIET_SECONDS", 0.5)
    with pytest.raises(RouteFailed, match="a tool was ended: nothing arrived"):
        packages.run(tool("sleep 1000 & echo $!; wait"), tmp_path, "a tool", None, None)
    pid = int((tmp_path / "tool.log").read_text())
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended but was not waited for does not)."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_tool_that_is_not_installed_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RouteFailed, match="npm is not installed"):
        packages.npm("a-package@1.0.0", FACT, tmp_path, None)
    with pytest.raises(RouteFailed, match="apt-get is not installed"):
        packages.debian("a-package", [], tmp_path, None, None)
