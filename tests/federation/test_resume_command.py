"""`fedlalr run` interrupted or killed as a real process, and `fedlalr resume` after it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from safetensors.torch import load_file
from typer.testing import CliRunner

from federation.interruptible import interruptible
from federation.small_disk import fill, small_disk
from fedlalr.cli import app

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
SMALL = ["quickstart", "clients_per_round=3", "local.epochs=1", "checkpoint_every=7"]


def start_and_stop(folder: Path, stop: signal.Signals, engine: str) -> tuple[int, str]:
    """Start an endless run, send its process group a signal after some rounds, and return its exit code and output."""
    command = [sys.executable, "-m", "fedlalr", "run", *SMALL, f"engine={engine}", "rounds=1000000", "-q"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=interruptible(PYTHONPATH=os.pathsep.join(sys.path)), start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 9):
        time.sleep(0.01)
    os.killpg(process.pid, stop)  # as a terminal sends Ctrl-C, and Slurm SIGTERM
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def cli(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    ("stop", "engine"),
    [
        (signal.SIGINT, "workers:1"),
        pytest.param(signal.SIGTERM, "reference", marks=pytest.mark.faults),
        pytest.param(signal.SIGTERM, "workers:1", marks=pytest.mark.faults),
        pytest.param(signal.SIGKILL, "workers:1", marks=pytest.mark.faults),
    ],
)
def test_a_run_that_was_stopped_resumes_to_the_bits_of_one_that_was_not(stop, engine, tmp_path):
    folder = tmp_path / "stopped"
    code, output = start_and_stop(folder, stop, engine)
    done = (folder / "metrics.jsonl").read_bytes().count(b"\n")
    saved = max(int(place.name.removeprefix("round-")) for place in (folder / "checkpoint").iterdir())
    if stop != signal.SIGKILL:
        assert code == 128 + stop, output
        assert "Traceback" not in output
        assert f"resume with: fedlalr resume {shlex.quote(str(folder))}" in output.replace("\n", "")
        assert saved == done
    else:
        assert code == -signal.SIGKILL
    rounds = done + 3
    cli("resume", str(folder), f"rounds={rounds}", "-q")
    cli("run", *SMALL, "engine=reference", f"rounds={rounds}", "--run-dir", str(tmp_path / "whole"), "-q")
    stopped, whole = (
        load_file(tmp_path / name / "checkpoint" / f"round-{rounds:06d}" / "state.safetensors")
        for name in ("stopped", "whole")
    )
    assert stopped.keys() == whole.keys()
    assert all(value.equal(whole[name]) for name, value in stopped.items())


def test_a_full_disk_is_a_message_and_the_run_resumes_when_there_is_room(tmp_path):
    """Whichever file it affects: the configuration at the start, a checkpoint, or the summary of the failure."""
    with small_disk(tmp_path / "disk", "-o", "size=1200k") as disk:
        folder, ballast = disk / "run", disk / "ballast"
        settings = [*SMALL[:-1], "checkpoint_every=1", "--run-dir", str(folder), "-q"]
        fill(ballast)
        assert "config.yaml cannot be written: No space left on device" in cli("run", *settings, "rounds=2", code=1)
        ballast.unlink()
        cli("run", *settings, "rounds=2")
        fill(ballast, leave=3 * 4096)
        said = cli("resume", str(folder), "rounds=4", "-q", code=1)
        assert "round 3 cannot be saved" in said
        assert "the last good checkpoint is round-000002" in said
        ballast.unlink()
        assert "after 4 rounds" in cli("resume", str(folder), "rounds=4", "-q")
        assert not list(folder.glob(".*.*")), "nothing half written is left"


def test_a_second_process_is_told_that_the_run_is_under_way(tmp_path):
    folder = tmp_path / "run"
    cli("run", *SMALL, "rounds=2", "--run-dir", str(folder), "-q")
    with FileLock(folder / ".lock"):
        assert "another process is working in" in cli("resume", str(folder), "rounds=3", "-q", code=2)
        again = ("run", *SMALL, "rounds=2", "--run-dir", str(folder), "-q", "--overwrite")
        assert "another process is working in" in cli(*again, code=2)
    assert "after 3 rounds" in cli("resume", str(folder), "rounds=3", "-q")


def test_a_damaged_checkpoint_is_a_warning_for_people(tmp_path):
    folder = tmp_path / "run"
    settings = [*SMALL[:-1], "checkpoint_every=1", "-q"]
    cli("run", *settings, "rounds=3", "--run-dir", str(folder))
    (folder / "checkpoint/round-000003/state.safetensors").write_bytes(b"nothing")
    said = cli("resume", str(folder), "rounds=4", "-q").replace("\n", " ")
    assert "warning: the checkpoint" in said
    assert "resuming from round 2 instead" in said
    assert "RuntimeWarning" not in said
    assert "after 4 rounds" in said
