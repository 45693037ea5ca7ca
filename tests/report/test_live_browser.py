"""The live page in a real browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedlalr.report.live import LiveServer
from fedlalr.report.runs import METRICS_FILE
from report.browser import Browser, chromium
from report.run_folders import copy_run, make_run, watching

pytestmark = pytest.mark.browser

LEGEND = "#curves-chart .legend li:first-child button"
STATE = (
    "return [scrollY, document.activeElement === document.querySelector('" + LEGEND + "'), "
    "document.querySelector('" + LEGEND + "').getAttribute('aria-pressed'), "
    "document.querySelector('#curves-y :checked').value, document.querySelector('#partition-choice').value, "
    "[...document.querySelectorAll('details[open] summary')].map(summary => summary.textContent), window.mark]"
)
ROWS = "#runs > .scroll:first-of-type tbody tr"
ROUNDS = f"return [...document.querySelectorAll('{ROWS}')].map(row => row.cells[2].textContent)"
EVIL = "evil.example"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for which a foreign name has the address of this machine, as after DNS rebinding."""
    rules = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
    with chromium(tmp_path_factory.mktemp("chromium"), rules) as browser:
        browser.resize(1200, 900)
        yield browser


@contextmanager
def serving(server: LiveServer | ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def wait_for(browser: Browser, script: str, wanted: object, patience: float = 60) -> None:
    until = time.monotonic() + patience
    while (found := browser.run(script)) != wanted:
        assert time.monotonic() < until, f"{found!r} instead of {wanted!r}"
        time.sleep(0.2)


def text_of(selector: str) -> str:
    return f"return document.querySelector('{selector}').textContent"


def test_a_page_follows_runs_from_before_their_start(browser: Browser, tmp_path: Path) -> None:
    with watching(tmp_path / "runs") as (_, address):
        browser.open(address)
        browser.complaints()  # of the last page, whose server has ended
        browser.run("window.mark = 'not reloaded'")
        assert "contains no run yet" in browser.run(text_of("header"))
        make_run(tmp_path / "runs" / "one", "algorithm=fedavg")
        wait_for(browser, ROUNDS, ["3"])
        assert browser.run(text_of("h1")) == "quickstart"
        assert browser.run("return document.title") == "quickstart – fedlalr report"
        make_run(tmp_path / "runs" / "two", "algorithm=fedadam")
        wait_for(browser, ROUNDS, ["3", "3"])
        browser.click("#configuration details:nth-of-type(2) summary")
        assert browser.run(text_of("details[open] summary")) == "config.yaml of FedAvg, seed 0"
        make_run(tmp_path / "runs" / "three")  # FedLALR becomes the first
        wait_for(browser, ROUNDS, ["3", "3", "3"])
        assert browser.run(text_of("details[open] summary")) == "config.yaml of FedAvg, seed 0"
        assert len(browser.run("return [...document.querySelectorAll('#curves-chart > svg > .line')]")) == 3
        assert browser.run(text_of("#live")).startswith("Live; last change at ")
        assert browser.run("return window.mark") == "not reloaded"
        loaded = browser.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
        assert set(loaded) == {address}
        assert browser.complaints() == []


def test_a_change_keeps_the_place_of_the_reader(browser: Browser, comparison_folder: Path, tmp_path: Path) -> None:
    runs = copy_run(comparison_folder, tmp_path / "runs")
    grows = runs / "fedavg" / "seed-0"
    lines = (grows / METRICS_FILE).read_bytes().splitlines(keepends=True)
    (grows / METRICS_FILE).write_bytes(lines[0])
    (grows / "summary.json").unlink()
    server = LiveServer([runs])
    with serving(server):
        browser.open(server.address)
        browser.complaints()  # of the last page, whose server has ended
        wait_for(browser, "return document.getElementById('live').textContent !== ''", True)
        browser.click("#curves-y input[value=loss]")
        browser.click("#configuration details:nth-of-type(2) summary")
        browser.run("const list = document.getElementById('partition-choice'); list.value = '1'; list.onchange()")
        browser.click(LEGEND)
        browser.run("window.mark = 7; scrollTo(0, scrollY + 100)")
        before = browser.run(STATE)
        assert before[1:5] == [True, "false", "loss", "1"]
        assert (len(before[5]), before[6]) == (1, 7)
        assert "1/3" in browser.run(ROUNDS)
        (grows / METRICS_FILE).write_bytes(b"".join(lines[:2]))
        wait_for(browser, "return " + ROUNDS.removeprefix("return ") + ".includes('2/3')", True)
        assert browser.run(STATE) == before
        assert browser.complaints() == []


def test_damage_and_a_stopped_server_leave_the_page_as_it_is(
    browser: Browser, comparison_folder: Path, tmp_path: Path
) -> None:
    good = copy_run(comparison_folder / "fedavg" / "seed-0", tmp_path / "runs" / "good")
    server = LiveServer([good.parent])
    with serving(server):
        browser.open(server.address)
        wait_for(browser, ROUNDS, ["3"])
        bad = copy_run(good, good.parent / "bad")
        (bad / METRICS_FILE).write_bytes(b"{}\n")
        wait_for(browser, "return document.querySelector('header').textContent.includes('Not shown: ')", True)
        assert browser.run(ROUNDS) == ["3"]
    wait_for(browser, text_of("#live"), "Not up to date: fedlalr watch does not answer.")
    assert browser.run(ROUNDS) == ["3"]
    with serving(LiveServer([good.parent], server.port)):
        wait_for(browser, "return document.querySelector('#live').textContent.startsWith('Live;')", True)


def test_other_sites_cannot_read_it(browser: Browser, comparison_folder: Path) -> None:
    class Other(BaseHTTPRequestHandler):
        """Another site on this machine."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>other</title><body></body>")

        def log_message(self, *_: object) -> None: ...

    server, other = LiveServer([comparison_folder]), ThreadingHTTPServer(("127.0.0.1", 0), Other)
    with serving(server), serving(other):
        for host in ("localhost", EVIL, "127.0.0.1"):
            browser.open(f"http://{host}:{other.server_address[1]}/")
            for mode in ("cors", "no-cors"):
                fetched = (
                    f"return fetch('{server.address}', {{mode: '{mode}'}}).then(() => 'read', error => error.name)"
                )
                assert browser.run(fetched) == "TypeError"
        browser.run(
            f"const frame = document.createElement('iframe'); frame.src = '{server.address}';"
            "return new Promise(done => { frame.onload = done; document.body.append(frame) })"
        )
        (child,) = browser.devtools("Page.getFrameTree")["frameTree"]["childFrames"]
        assert child["frame"]["unreachableUrl"] == server.address
        browser.open(f"http://{EVIL}:{server.port}/")  # the name of a foreign site, at this machine's address
        assert browser.run("return document.body.textContent") == (f"This page is only available at {server.address}.")
        browser.open(f"http://localhost:{server.port}/")
        assert browser.run(text_of("h1")) == "quickstart"
