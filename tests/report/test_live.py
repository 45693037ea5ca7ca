"""The live page over HTTP; in a browser: test_live_browser.py."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedlalr.cli import app
from fedlalr.report import live
from fedlalr.report.live import LiveReport, LiveServer
from fedlalr.report.runs import METRICS_FILE, find_runs
from report.run_folders import copy_run, watching


@contextmanager
def served(*places: Path) -> Iterator[LiveServer]:
    with LiveServer(places) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: LiveServer, headers: dict[str, str] | None = None, path: str = "/", method: str = "GET") -> tuple:
    """Status, headers and text of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


@pytest.fixture
def run(comparison_folder: Path, tmp_path: Path) -> Path:
    """A finished run of three rounds that a test may change."""
    return copy_run(comparison_folder / "fedavg" / "seed-0", tmp_path / "runs" / "one")


def test_the_page_is_the_report_and_follows_its_run(run: Path) -> None:
    lines = (run / METRICS_FILE).read_bytes().splitlines(keepends=True)
    (run / "summary.json").unlink()
    (run / METRICS_FILE).write_bytes(b"".join(lines[:2]) + lines[2][:50])  # the third line is being written
    with served(run.parent) as server:
        status, headers, text = ask(server)
        assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert "<td>2/3</td>" in text
        assert "connect-src 'self'" in text
        known = {"If-None-Match": headers["ETag"]}
        assert ask(server, known)[::2] == (304, "")
        (run / METRICS_FILE).write_bytes(b"".join(lines))
        status, headers, text = ask(server, known)
        assert (status, "<td>3</td>" in text) == (200, True)
        assert headers["ETag"] != known["If-None-Match"]


def test_unchanged_runs_are_not_read_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = copy_run(run, run.parent / "two")
    read = []
    monkeypatch.setattr(live, "read_run", lambda path, original=live.read_run: read.append(path) or original(path))
    viewed = []
    monkeypatch.setattr(
        live, "view_partitions", lambda runs, original=live.view_partitions: viewed.append(runs) or original(runs)
    )
    report = LiveReport([run.parent])
    first = report.page()
    assert report.page() == first
    assert read == [run, other]
    os.truncate(other / METRICS_FILE, 0)
    assert report.page() != first
    assert read == [run, other, other]
    assert len(viewed) == 1


def test_a_directory_may_be_empty_at_first(run: Path, tmp_path: Path) -> None:
    later = tmp_path / "later"
    report = LiveReport([later])
    assert f"{later} contains no run yet." in report.page()
    copy_run(run, later / "new")
    assert "contains no run yet" not in report.page()
    shutil.rmtree(later)
    assert f"{later} contains no run yet." in report.page()


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (METRICS_FILE, b'{"round": 1}\n', "the records in"),
        (METRICS_FILE, b"\xff\xfe\n", "the records in"),
        ("summary.json", b'{"status": "fin', "the records in"),
        ("config.yaml", b"rounds: [", "config.yaml"),
        ("trajectory.jsonl", b"[]\n", "the records in"),
        ("trajectory.jsonl", b'{"round": 1, "client": [], "step": 1, "values": 7}\n', "the files in"),
        ("summary.json", b'{"status": "failed", "rejected_at_failure": 7}', "the files in"),
    ],
)
def test_a_damaged_run_is_named_and_the_others_are_shown(run: Path, file: str, content: bytes, reason: str) -> None:
    damaged = copy_run(run, run.parent / "two")
    (damaged / file).write_bytes(content)
    text = LiveReport([run.parent]).page()
    note = text[text.index("Not shown: ") :].split("</p>")[0]
    assert reason in note
    assert str(damaged) in note
    assert "<td>3</td>" in text


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs a file that cannot be read, even by root")
def test_a_run_whose_files_cannot_be_read_is_named(run: Path) -> None:
    (run / "summary.json").unlink()
    (run / "summary.json").symlink_to("/proc/self/mem")
    assert "Not shown: [Errno 5]" in LiveReport([run.parent]).page()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:{port}"}, 200),
        ({"Host": "LOCALHOST:{port}"}, 200),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": "evil.example:{port}"}, 421),
        ({"Host": "127.0.0.1.evil.example:{port}"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"Origin": "http://localhost:{port}"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 200),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ],
)
def test_foreign_hosts_and_origins_are_rejected(shared: LiveServer, headers: dict[str, str], status: int) -> None:
    given = {name: value.format(port=shared.port) for name, value in headers.items()}
    found, answered, text = ask(shared, given)
    assert found == status
    assert ("<h1>" in text) == (status == 200)
    assert answered["Cross-Origin-Resource-Policy"] == "same-origin"
    assert answered["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert "Access-Control-Allow-Origin" not in answered


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with served(tmp_path_factory.mktemp("empty")) as server:
        yield server


def test_two_hosts_are_rejected(shared: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=30) as connection:
        host = f"Host: 127.0.0.1:{shared.port}\r\n"
        connection.sendall(f"GET / HTTP/1.1\r\n{host}Host: evil.example\r\n\r\n".encode())
        assert b" 421 " in connection.recv(100)


def test_only_the_page_can_be_read_and_nothing_written(shared: LiveServer) -> None:
    for path in ("/metrics.jsonl", "/../../etc/passwd", "//evil.example/", "/?x"):
        assert ask(shared, path=path)[0] == 404
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        assert ask(shared, method=method)[0] == 501
    assert shared.server_address[0] == "127.0.0.1"


def test_an_error_is_shown_to_the_reader(shared: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LiveReport) -> str:
        raise RuntimeError("no page today")

    monkeypatch.setattr(LiveReport, "page", fail)
    assert ask(shared)[::2] == (500, "RuntimeError: no page today")


def test_a_reader_that_leaves_is_ignored(shared: LiveServer, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
        connection.sendall(b"GET / HTTP/1.1\r\nHost:")
    assert ask(shared)[0] == 200
    assert capfd.readouterr().err == ""


def test_runs_are_found_in_the_order_of_their_numbers_without_tuning_runs(run: Path) -> None:
    copy_run(run, run.parent / "grid" / "lr")
    copy_run(run, run.parent / "runs-10")
    copy_run(run, run.parent / "runs-9")
    assert [path.name for path in find_runs([run.parent])] == ["one", "runs-9", "runs-10"]


def test_the_command_serves_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    with watching(tmp_path / "later", "--open") as (process, address):
        connection = http.client.HTTPConnection(address.removeprefix("http://").rstrip("/"), timeout=60)
        connection.request("GET", "/")
        assert "contains no run yet" in connection.getresponse().read().decode()
        assert opened.read_text() == address
        port = address.rstrip("/").rpartition(":")[2]
        taken = CliRunner().invoke(app, ["watch", str(tmp_path), "--port", port])
        assert taken.exit_code == 2
        assert f"port {port} cannot be used: Address already in use" in taken.output
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_a_file_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.touch()
    result = CliRunner().invoke(app, ["watch", str(file)])
    assert (result.exit_code, "is a file" in result.output) == (2, True)
