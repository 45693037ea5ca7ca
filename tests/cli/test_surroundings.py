"""The command in places that are not a desktop: no home folder, signals while it starts, names with escape codes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedlalr as fl
from federation.interruptible import interruptible
from fedlalr.cli import app
from fedlalr.cli.errors import complain
from fedlalr.cli.options import progress_console
from fedlalr.data import fetch
from fedlalr.federation.replies.screening import Rejection

RED = "\x1b[31m"
HOMELESS = """
import os
from typer.testing import CliRunner
from fedlalr.cli import app

for arguments in (
    "run quickstart rounds=1 --run-dir run -q", "resume run rounds=2 -q", "report run", "data list", "presets",
    "compare quickstart rounds=1 --methods fedavg --seeds 1 -q", "theory", "run --run-dir=~/run", "run data.folder=~/x",
):
    result = CliRunner().invoke(app, arguments.split())
    home = "there is no home folder" in result.output.replace(os.linesep, " ")
    print(arguments.split()[0], result.exit_code, "no home" if home else "")
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
"""


class Rude(torch.nn.Linear):
    """A client whose data has a mark in it makes an error with words of its own."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training and (inputs == 99).any():
            raise ValueError(RED)
        return super().forward(inputs)


def no_home(*command: str) -> list[str]:
    """A command as a user that the machine has no entry of, and without HOME; skips where that is not allowed."""
    strange = [
        "unshare",
        "--user",
        "--map-user=54321",
        "env",
        "-u",
        "HOME",
        "-u",
        "XDG_CACHE_HOME",
        "-u",
        "FEDLALR_DATA",
    ]
    if shutil.which("unshare") is None or subprocess.run([*strange, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to be another user")
    return [*strange, *command]


def test_every_command_works_without_a_home(tmp_path: Path) -> None:
    done = subprocess.run(
        no_home(sys.executable, "-c", HOMELESS),
        cwd=tmp_path,
        env=interruptible(PYTHONPATH=os.pathsep.join(map(os.path.abspath, sys.path))),
        capture_output=True,
        text=True,
    )
    assert done.stdout.split("\n") == [
        "run 0 ", "resume 0 ", "report 0 ", "data 0 ", "presets 0 ", "compare 0 ", "theory 0 ", "run 2 no home",
        "run 2 no home", "",
    ], done.stderr  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "runs"], "nothing is written that was not asked"


def test_without_a_home_data_is_kept_here_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(_: int) -> None:
        raise KeyError("no entry")

    monkeypatch.chdir(tmp_path)
    for name in ("HOME", "XDG_CACHE_HOME", "FEDLALR_DATA"):
        monkeypatch.delenv(name, raising=False)
    said: list[str] = []
    monkeypatch.setattr("pwd.getpwuid", nobody)
    with fetch.locked(fetch.data_folder(), "mnist", lambda what, *_: said.append(what)):
        assert fetch.data_folder() == tmp_path / ".fedlalr" / "data"
    assert len(said) == 1
    assert "there is no home folder" in said[0]
    assert "FEDLALR_DATA" in said[0]
    monkeypatch.setenv("FEDLALR_DATA", "~/data")
    with pytest.raises(FileNotFoundError, match="write the full path"):
        fetch.data_folder()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="looks for the handler of a signal under /proc")
def test_a_signal_during_imports_ends_the_command_without_a_traceback() -> None:
    def handles_sigterm(process: subprocess.Popen[str]) -> bool:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "fedlalr", "presets"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=interruptible(PYTHONPATH=os.pathsep.join(sys.path)),
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        )  # fmt: skip
        while process.poll() is None and not handles_sigterm(process):
            time.sleep(0.001)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (128 + number, ""), "torch takes seconds to import"


def test_escape_codes_are_shown_and_not_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["quickstart", "rounds=1", "clients_per_round=2", r'name="\e[31m"']
    shown = CliRunner().invoke(app, ["run", *settings, "--run-dir", str(tmp_path / "run")])
    assert shown.exit_code == 0, shown.output
    assert "\\x1b[31m with fedlalr" in shown.output
    assert "\x1b" not in shown.output
    complain(f"error: {RED}")
    progress_console(as_json=True).print(RED)
    assert capsys.readouterr().err == "error: \\x1b[31m\n\\x1b[31m\n"
    clients = [(torch.full((4, 3), mark), torch.zeros(4, dtype=torch.int64)) for mark in (99.0, 1.0, 2.0)]
    fl.run(Rude(3, 2), clients, fl.FedAvg(0.1), rounds=1, engine="reference", debug=True)
    said = capsys.readouterr().err
    assert "\\x1b[31m" in said
    assert "\x1b" not in said
    assert Rejection.because(3, f"ValueError: {RED}\x9b2J").reason == "ValueError: \\x1b[31m\\x9b2J"
