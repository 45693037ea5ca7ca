"""Headless Chromium, driven over the WebDriver protocol, which is JSON over HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key under which the protocol gives the id of an element."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-device-scale-factor=1",
)


class Browser:
    """One window."""

    def __init__(self, address: str, session: str) -> None:
        self._base = f"{address}/session/{session}"

    def open(self, page: Path | str) -> None:
        """A file, or an address."""
        _call(f"{self._base}/url", {"url": page if isinstance(page, str) else page.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """The value that a script returns."""
        return _call(f"{self._base}/execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        """A real click, which fails if something covers the element."""
        element = _call(f"{self._base}/element", {"using": "css selector", "value": selector})[ELEMENT]
        _call(f"{self._base}/element/{element}/click", {})

    def press(self, selector: str, keys: str) -> None:
        element = _call(f"{self._base}/element", {"using": "css selector", "value": selector})[ELEMENT]
        _call(f"{self._base}/element/{element}/value", {"text": keys})

    def devtools(self, command: str, **parameters: Any) -> Any:
        return _call(f"{self._base}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )

    def scheme(self, name: str) -> None:
        """`light` or `dark`, as the reader's system says."""
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def offline(self) -> None:
        self.devtools("Network.enable")
        self.devtools(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )

    def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        entries = _call(f"{self._base}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self, path: Path) -> Path:
        """The whole page, not only what the window shows."""
        image = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(image["data"]))
        return path


@contextmanager
def chromium(folder: Path, *flags: str) -> Iterator[Browser]:
    """A browser with an empty profile in a folder; it ends with the block."""
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium")
    assert driver, "the browser tests need chromedriver (Debian: apt-get install chromium chromium-driver)"
    assert browser, "the browser tests need chromium (Debian: apt-get install chromium chromium-driver)"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait_for(address)
        options = {"binary": browser, "args": [*FLAGS, *flags, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _call(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            _call(f"{address}/session/{session}", None, method="DELETE")
    finally:
        process.terminate()
        process.wait()


def _wait_for(address: str, patience: float = 60) -> None:
    until = time.monotonic() + patience
    while True:
        try:
            if _call(f"{address}/status", None, method="GET")["ready"]:
                return
        except OSError:
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def _call(url: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback, even if a proxy is set
    try:
        with opener.open(request, timeout=120) as response:
            return json.loads(response.read())["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.loads(error.read())["value"]["message"]) from error
