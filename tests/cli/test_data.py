import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedlalr.cli import app
from fedlalr.data.partition import SCHEMES


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "data"))


def data(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["data", *arguments])


def test_every_data_set_is_listed_with_its_location() -> None:
    result = data("list")
    assert result.exit_code == 0
    for name in ("digits", "mnist", "fashion", "cifar10", "cifar100", "shakespeare"):
        assert name in result.stdout
    assert "in scikit-learn" in result.stdout
    assert "fedlalr data fetch cifar100" in result.stdout
    listed = json.loads(data("list", "--json").stdout)
    assert [one["train"] for one in listed if one["name"] == "cifar10"] == [50_000]


def test_the_bundled_data_set_needs_no_download() -> None:
    result = data("fetch", "digits")
    assert result.exit_code == 0
    assert result.stdout == "digits: scikit-learn\n"


def test_a_partition_is_described_and_drawn() -> None:
    result = data("show", "digits", "--partition", "dirichlet", "--alpha", "0.1", "--clients", "20")
    assert result.exit_code == 0, result.output
    assert "dirichlet 0.1, 20 clients, seed 0" in result.stdout
    assert "classes per client" in result.stdout
    assert Path("digits-dirichlet-0.1.png").read_bytes().startswith(b"\x89PNG")


def test_the_description_is_available_as_json() -> None:
    skewed, even = (
        json.loads(data("show", "digits", "--partition", p, "--json", "--output", f"{p}.svg").stdout)
        for p in ("shards", "iid")
    )
    assert skewed["total_variation"] > even["total_variation"]
    assert even["samples"] == 1442
    assert Path("iid.svg").is_file()


@pytest.mark.parametrize("command", [("run", "fashion", "rounds=1"), ("data", "fetch", "fashion")])
def test_an_unusable_data_folder_is_a_one_line_error(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLALR_DATA", "/proc/x")
    result = CliRunner().invoke(app, [*command])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "/proc/x cannot be made" in result.stderr
    assert "set FEDLALR_DATA to a folder you may write to" in result.stderr


def test_the_folder_of_a_figure_is_created() -> None:
    assert data("show", "digits", "--output", "new/digits.svg").exit_code == 0
    assert Path("new/digits.svg").is_file()


def test_the_options_of_the_schemes_are_options_of_the_command() -> None:
    shards = ("show", "digits", "--partition", "shards", "--clients", "4", "--json")
    rejected = data(*shards)
    assert rejected.exit_code == 2
    assert "use at least classes_per_client=3" in rejected.stderr
    few, all_of_them = (json.loads(data(*shards, "--classes-per-client", k).stdout) for k in ("3", "10"))
    assert few["total_variation"] > all_of_them["total_variation"]
    sizes = ("show", "digits", "--partition", "lognormal", "--clients", "20", "--json")
    even, spread = (json.loads(data(*sizes, "--sigma", sigma).stdout) for sigma in ("0", "2"))
    assert even != spread
    assert "only by 'shards'" in data("show", "digits", "--classes-per-client", "3").stderr


def test_the_help_lists_every_scheme() -> None:
    shown = data("show", "--help").stdout
    for scheme in SCHEMES:
        assert scheme in shown
