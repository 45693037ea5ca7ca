"""Configurations that cannot run on Flower are rejected before an app is written or a process started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="Flower is not installed")

from fedlalr.cli import app

SHARDS = "preset: quickstart\npartition: {scheme: shards, clients: 20, classes_per_client: 2}\n"
REJECTED = [
    (["clients_per_round=9"], "clients_per_round is 9 but there are only 3 clients; use at most 3"),
    (["min_clients=9"], "min_clients is 9 but only 3 clients take part"),
    (["buffers=recalibrate"], "use buffers='average'"),
    (["trajectory.clients=[0]"], "remove `trajectory` to run on Flower"),
    (["reduce={q: median}"], "q"),
    (["--nodes", "2", "partition.clients=9"], "--nodes 2 contradicts partition.clients=9"),
    (["partition.clients=null"], "one per node: set partition.clients=3"),
    (["partition.clients=5000"], "use fewer clients"),
]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def nothing_starts(monkeypatch):
    def start(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr("fedlalr.flower.local.processes.Processes.start", start)


def flower(*arguments):
    return CliRunner().invoke(app, ["flower", *arguments])


def assert_rejected(result, message):
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(("arguments", "message"), REJECTED)
def test_an_app_that_could_not_run_is_not_written(arguments, message):
    assert_rejected(flower("export", "quickstart", "app", *arguments), message)
    assert not Path("app").exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *REJECTED,
        *((["--patience", value], "--patience must be a finite number of seconds above 0") for value in ("-5", "nan")),
    ],
)
def test_a_federation_that_could_not_run_is_not_started(arguments, message):
    assert_rejected(flower("local", "quickstart", *arguments), message)


@pytest.mark.usefixtures("nothing_starts")
def test_shards_that_leave_classes_to_nobody_are_rejected():
    Path("shards.yaml").write_text(SHARDS, encoding="utf-8")
    message = "3 clients with classes_per_client=2 leave some of the 10 classes without a client"
    assert_rejected(flower("export", "shards.yaml", "app"), message)
    assert_rejected(flower("local", "shards.yaml"), message)
    assert flower("export", "shards.yaml", "app", "--nodes", "5").exit_code == 0


def test_settings_and_folder_may_come_in_any_order():
    assert_rejected(flower("export", "quickstart", "rounds=3"), "fedlalr flower export quickstart app rounds=3")
    assert_rejected(flower("export", "quickstart", "app", "other"), "'other' is not a setting")
    assert not list(Path().iterdir())
    result = flower("export", "quickstart", "rounds=3", "app")
    assert result.exit_code == 0, result.output
    assert "rounds: 3" in Path("app/quickstart_app/config.yaml").read_text()


def test_the_printed_command_quotes_the_folder():
    assert "flwr run 'my app' --stream" in flower("export", "quickstart", "my app").stdout
    assert_rejected(flower("export", "quickstart", "/proc/q"), "choose another folder for the app")


def test_missing_data_is_not_checked_and_the_output_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "none"))
    result = flower("export", "cifar100", "app", "--nodes", "4")
    assert result.exit_code == 0, result.output
    assert "cifar100 is not on this machine" in result.stdout
