"""`fedlalr flower local` with real processes: it runs, and leaves no process and no file, even after Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

pytestmark = [pytest.mark.flower, pytest.mark.timeout(1500)]


def command(folder, *arguments):
    """Start the command with its own temporary folder, by which its processes are found."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "fedlalr", "flower", "local", "rounds=2", "local.epochs=1", "--nodes", "2", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore SIGINT
    )


def left_behind(folder):
    """Processes started with that temporary folder, and files in it."""
    wanted = f"TMPDIR={folder / 'tmp'}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" "))
    return found, list((folder / "tmp").iterdir())


def test_a_demonstration_runs_and_cleans_up(tmp_path):
    process = command(tmp_path, "--json", "--run-dir", str(tmp_path / "run"))
    output, _ = process.communicate(timeout=1400)
    assert process.returncode == 0, output
    summary = json.loads(output.splitlines()[-1])
    assert (summary["rounds"], summary["clients"], summary["engine"]) == (2, 2, "flower")
    assert summary["accuracy"] > 0.2
    assert left_behind(tmp_path) == ([], [])
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("\n") == 2
    other = command(tmp_path, "--json", "--run-dir", str(tmp_path / "run"), "algorithm=fedavg")
    output, _ = other.communicate(timeout=1400)
    assert other.returncode == 1, "the results of another run are not those of this one"
    assert "cannot be resumed with different settings" in output


@pytest.mark.parametrize(
    ("number", "awaited"),
    [(signal.SIGINT, b"client.trainer"), (signal.SIGTERM, b"flower-supernode")],
    ids=["SIGINT while nodes train", "SIGTERM while nodes start"],
)
def test_an_interrupted_demonstration_cleans_up(tmp_path, number, awaited):
    process = command(tmp_path)
    seen = ""
    for line in process.stdout:
        seen += line
        if "starting the superlink" in line:
            break
    deadline = time.monotonic() + 600
    while not any(awaited in name for name in left_behind(tmp_path)[0]):
        assert process.poll() is None, seen
        assert time.monotonic() < deadline, f"there is no process {awaited}"
        time.sleep(0.2)
    process.send_signal(number)
    rest, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number, seen + rest
    assert left_behind(tmp_path) == ([], [])
