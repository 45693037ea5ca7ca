"""`progress=`: on a terminal and in a notebook by default, elsewhere on request."""

from __future__ import annotations

import builtins
import io
import os
import sys
import threading
import types
from contextlib import suppress

import pytest

import fedlalr as fl
from conftest import make_clients, make_model
from fedlalr import config

pytestmark = pytest.mark.skipif(os.name != "posix", reason="terminals as POSIX has them")
OPTIONS = {"rounds": 3, "clients_per_round": 2, "engine": "reference"}


def run(**options):
    return fl.run(make_model(), make_clients(), fl.FedAvg(0.1), **{**OPTIONS, **options})


class Screen:
    """A pseudo-terminal in place of standard error, read as it is written so that the writer never waits."""

    def __enter__(self) -> Screen:
        self.master, slave = os.openpty()
        self.content, self.before, self.stream = io.BytesIO(), sys.stderr, os.fdopen(slave, "w")
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        sys.stderr = self.stream
        return self

    def __exit__(self, *_: object) -> None:
        sys.stderr = self.before
        self.stream.close()
        self.reader.join()
        os.close(self.master)

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(self.master, 4096):
                self.content.write(data)

    @property
    def text(self) -> str:
        """Everything that was written."""
        return self.content.getvalue().decode()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("TERM", "xterm")
    return Screen()


def test_without_a_terminal_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    run()
    run(progress=False)
    assert capfd.readouterr() == ("", "")


def test_on_request_there_is_a_line_per_round(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as services that build projects set it
    run(progress=True)
    shown, lines = capfd.readouterr()
    assert shown == ""
    heading, *rounds = lines.splitlines()
    assert heading.startswith("FedAvg: 5 clients, 2 per round, 51 parameters; engine reference (requested) on cpu")
    assert [line[:9] for line in rounds] == ["round 1/3", "round 2/3", "round 3/3"]
    assert "\x1b" not in lines


def test_on_a_terminal_a_line_is_updated(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())

    class Printing(fl.Observer):
        def on_round(self, record: fl.Record) -> None:
            print("printed", record.round)

    with screen:
        run(observers=[Printing()])
    text = screen.text
    assert "FedAvg: 5 clients" in text
    assert "3/3" in text
    assert "\x1b[2K" in text  # the line is cleared and written again
    assert sys.stdout.getvalue() == "printed 1\nprinted 2\nprinted 3\n"  # to a file, so not moved to the terminal


def test_on_a_terminal_it_can_be_turned_off(screen: Screen) -> None:
    with screen:
        run(progress=False)
    assert screen.text == ""


def test_a_configuration_shows_only_what_its_command_shows(screen: Screen) -> None:
    small = ["rounds=1", "partition.clients=5", "clients_per_round=2", "local.steps=1", "engine=reference"]
    with screen:
        config.execute(config.load("quickstart", small))
    assert screen.text == ""


def test_after_an_error_the_terminal_is_restored(screen: Screen) -> None:
    class Broken(fl.Observer):
        def on_round(self, record: fl.Record) -> None:
            raise ZeroDivisionError

    with screen, pytest.raises(ZeroDivisionError):
        run(observers=[Broken()])
    assert "\x1b[?25h" in screen.text  # the cursor is visible again


def test_a_resumed_run_counts_the_bytes_sent_before(tmp_path, capfd: pytest.CaptureFixture[str]) -> None:
    run(rounds=2, run_dir=tmp_path)
    result = run(rounds=3, run_dir=tmp_path, resume=True, progress=True)
    sent = (result.bytes_up + result.bytes_down) / 1e6
    assert f"  {sent:.1f} MB sent" in capfd.readouterr().err
    assert [record.round for record in result.info.history] == [1, 2]


def test_a_program_that_imports_ipython_is_no_notebook(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    run()
    assert capfd.readouterr() == ("", "")


class Handle:
    """IPython's handle of something displayed that can be replaced."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, content: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(content["text/plain"])


def test_in_a_notebook_the_text_below_the_cell_is_updated(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """IPython is not among the dependencies, so this stands in for what is used of it."""
    handle = Handle()

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert display_id
        handle.update(content, raw)
        return handle

    class ZMQInteractiveShell:
        """The shell of a notebook, recognised by its name."""

    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    run()
    assert handle.shown[0].startswith("FedAvg: 5 clients")
    assert handle.shown[-1].splitlines()[1].startswith("round 3/3  training loss ")
    assert capfd.readouterr() == ("", "")
    handle.shown.clear()
    run(progress=False)
    assert handle.shown == []
