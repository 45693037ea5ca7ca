import shlex
from pathlib import Path

import pytest

from fedlalr import config
from fedlalr.cli.options import split_arguments
from fedlalr.config import Config
from fedlalr.report.rerun_command import command_for, description_of, stored_command


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["rounds=7", "seed=3"],
        ["algorithm=fedadam", "algorithm.server_lr=0.5", "algorithm.betas=[0.8, 0.9]"],
        ["local.steps=4", "partition=iid", "partition.clients=10"],
        ["model=logistic", "batch_size=null", "clip_norm=1.5", "dtype=float64"],
        ["reduce={v_hat: median}", "max_norm_ratio=null", "data.validation=0.2"],
        ["data.folder=/some/where with space", "local={start: 3, base: 4.0}"],
    ],
)
def test_the_command_means_the_same_configuration(overrides: list[str]) -> None:
    wanted = config.load("quickstart", overrides)
    command = command_for(wanted)
    assert command is not None
    program, verb, preset, *given = shlex.split(command)
    assert (program, verb, preset) == ("fedlalr", "run", "quickstart")
    assert config.load(preset, given).problem() == wanted.problem()


def test_what_is_as_the_preset_has_it_is_not_repeated() -> None:
    assert command_for(config.load("quickstart")) == "fedlalr run quickstart"
    assert command_for(config.load("cifar10", ["algorithm=fedavg", "seed=1"])) == (
        "fedlalr run cifar10 algorithm=fedavg seed=1"
    )


def test_a_text_that_reads_like_a_number_is_quoted() -> None:
    command = command_for(config.load("quickstart", ['data.folder="12"']))
    assert command == """fedlalr run quickstart 'data.folder="12"'"""


def test_a_configuration_of_ones_own_has_no_command() -> None:
    plain = config.load("quickstart").model_dump()
    assert command_for(Config.model_validate(plain | {"name": "mine"})) is None


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a file that builds on a preset, with an override, from a folder of its own."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("preset: quickstart\nrounds: 2\n")
    return config.load("mine.yaml", ["algorithm=fedavg", "seed=5"])


@pytest.mark.parametrize(
    "folder", ["two", "of mine/it's", "alpha=0.1/seed-0", "all/alpha=0.1/seed-0", "-dashed", ".", "../beside"]
)
def test_the_configuration_that_a_run_stored_is_a_command(mine: Config, folder: str) -> None:
    config.RunDirectory(folder).write_config(mine)
    command = stored_command(mine, Path(folder))
    assert command is not None
    program, verb, file, option, again = shlex.split(command)
    assert (program, verb, option) == ("fedlalr", "run", "--run-dir")
    source, overrides = split_arguments([file])
    assert config.load(source, overrides).problem() == mine.problem()
    assert not Path(again).exists()
    assert again.startswith("again/")


def test_a_directory_that_holds_another_configuration_or_none_is_no_command(mine: Config) -> None:
    assert stored_command(mine, Path("empty")) is None
    config.RunDirectory("other").write_config(config.load("mine.yaml"))
    assert stored_command(mine, Path("other")) is None


def test_a_preset_that_an_override_cannot_reach_has_no_command() -> None:
    plain = config.load("quickstart").model_dump()
    del plain["model"]["hidden"]
    assert command_for(Config.model_validate(plain)) is None


def test_a_description_says_how_far_a_run_is_from_the_preset_it_was_written_for() -> None:
    printed = config.load("cifar10")
    assert description_of([printed, config.load("cifar10", ["algorithm=fedavg", "seed=2"])]) == printed.description
    small = config.load("cifar10", ["partition.clients=20", "clients_per_round=10", "rounds=5", "batch_size=20"])
    assert description_of([printed, small]) == (
        f"{printed.description}; changed: partition.clients, rounds, clients_per_round, batch_size"
    )


def test_a_description_of_ones_own_is_left_as_it_is() -> None:
    mine = config.load("cifar10", ["description=my own", "rounds=5"])
    assert description_of([mine]) == "my own"


def test_a_file_that_builds_on_a_preset_is_told_apart_from_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("preset: quickstart\nrounds: 60\n")
    assert description_of([config.load(str(tmp_path / "mine.yaml"))]).endswith("; changed: rounds=60")
