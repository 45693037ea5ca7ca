import json
import math
import re
import shlex
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedlalr as fl
from fedlalr.cli import app
from fedlalr.config import Config, load
from fedlalr.federation import Rejection
from fedlalr.report.groups import group_runs
from fedlalr.report.html import page, write_report
from fedlalr.report.runs import ReportedRun, find_runs, read_run
from fedlalr.report.sections import rejections_table, runs_table
from report.run_folders import SMALL, make_run
from settings import replaced

VOID = {"meta", "link", "input", "br"}


class Checker(HTMLParser):
    """Collects the words of a page and everything it would load; rejects tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        given = dict(attrs)
        self.loaded += [value for key in ("src", "href") if (value := given.get(key)) and not value.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


@pytest.fixture(scope="module")
def text(comparison_folder: Path) -> str:
    return page([read_run(path) for path in find_runs([comparison_folder])])


def test_the_page_is_whole_and_loads_nothing(text: str) -> None:
    assert checked(text).loaded == ["data:,"]
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    assert "url(" not in text


def test_every_part_is_there(text: str) -> None:
    words = " ".join(checked(text).words)
    for part in (
        "Results",
        "Curves",
        "Client trajectories",
        "Configuration",
        "Partition",
        "Rejected clients",
        "Timing",
    ):
        assert part in words
    assert "fedlalr run quickstart algorithm=fedavg partition.clients=12 rounds=3" in words
    assert "local training" in words
    assert "x is not finite" in words
    assert "label entropy of a client" in words
    assert "too few to tell" in words
    assert "engine reference" in words


def test_the_same_runs_give_the_same_page(text: str, comparison_folder: Path) -> None:
    assert page([read_run(path) for path in find_runs([comparison_folder])]) == text


def test_the_drawn_data_is_that_of_the_runs(text: str, comparison_folder: Path) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S)
    assert found is not None
    data = json.loads(found[1])
    assert [curves["label"] for curves in data["curves"]] == ["FedLALR", "FedAvg"]
    runs = [read_run(comparison_folder / "fedavg" / f"seed-{seed}") for seed in (0, 1)]
    mean = sum(run.records[-1].loss for run in runs) / 2
    assert data["curves"][1]["y"]["loss"]["mean"][-1] == pytest.approx(mean, rel=1e-4)
    assert len(data["trajectories"]) == 2
    assert [len(view["counts"]) for view in data["partitions"]] == [12, 12]


def test_infinite_losses_and_metrics_are_left_out_of_the_curves(comparison_folder: Path) -> None:
    run = read_run(comparison_folder / "fedavg" / "seed-0")
    records = [replace(record, loss=math.inf, metrics={"psnr": math.inf}) for record in run.records]
    text = page([replace(run, records=[*records[:-1], replace(records[-1], loss=0.5)])])
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S)
    assert found is not None
    drawn = json.loads(found[1])["curves"][0]["y"]
    assert drawn["loss"]["mean"] == [*[None] * (len(records) - 1), 0.5]
    assert drawn["metrics/psnr"] is None


def test_words_of_a_configuration_cannot_become_markup(comparison_folder: Path) -> None:
    run = read_run(comparison_folder / "fedavg" / "seed-0")
    assert run.config is not None
    evil = "</script><script>alert(1)</script><b onclick='x'>"
    plain = run.config.model_dump() | {"name": evil, "description": evil}
    record = replace(run.records[0], rejected=(Rejection(3, evil),))
    text = page([replace(run, config=Config.model_validate(plain), records=[record], path=Path(evil))])
    checked(text)
    assert "<script>alert" not in text
    assert "<b onclick" not in text


def test_only_the_pages_own_script_may_run(text: str) -> None:
    import base64
    import hashlib

    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    script = re.search(r"<script>(.*?)</script>", text, flags=re.S)
    assert policy is not None
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert "default-src 'none'" in policy[1]


def test_a_run_from_python_is_reported_by_its_checkpoint(tmp_path: Path) -> None:
    clients = [(torch.randn(8, 3), torch.randint(0, 2, (8,))) for _ in range(3)]
    fl.run(torch.nn.Linear(3, 2), clients, fl.FedAvg(lr=0.125), rounds=2, engine="reference", run_dir=tmp_path)
    words = " ".join(checked(write_report([tmp_path], tmp_path / "page.html").read_text(encoding="utf-8")).words)
    assert "started from Python" in words
    assert "no summary" not in words
    assert "0.125" in words


def test_methods_on_different_data_are_not_ranked(comparison_folder: Path) -> None:
    run = read_run(comparison_folder / "fedavg" / "seed-0")
    assert run.config is not None
    other = run.config.model_dump()
    other["partition"]["alpha"] = 5.0
    assert "Methods compared" not in page([run, replace(run, config=Config.model_validate(other))])
    other["partition"]["alpha"] = run.config.partition.alpha
    other["algorithm"]["lr"] = 0.5
    assert "Methods compared" in page([run, replace(run, config=Config.model_validate(other))])


def test_a_run_without_a_round_is_reported(comparison_folder: Path) -> None:
    run = read_run(comparison_folder / "fedavg" / "seed-0")
    failed = replace(run, records=[], summary={"status": "failed", "failure": "round 1: not finite"})
    words = " ".join(checked(page([failed])).words)
    assert "round 1: not finite" in words
    assert "0/3" in words


def test_a_run_of_ones_own_file_is_made_again_by_the_command_on_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.yaml").write_text("preset: quickstart\n")
    for folder, *changes in (("all/seed=0", "algorithm=fedavg"), ("all/my own", "seed=3")):
        made = ["run", "two.yaml", *replaced(SMALL, changes), "--run-dir", folder]
        assert CliRunner().invoke(app, made).exit_code == 0
    page = checked(write_report(["all"], tmp_path / "page.html").read_text(encoding="utf-8"))
    commands = [line for words in page.words for line in words.splitlines() if line.startswith("fedlalr run ")]
    assert len(set(commands)) == 2
    for command in commands:
        _, *arguments = shlex.split(command)
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    for folder in ("all/seed=0", "all/my own"):
        before, again = read_run(Path(folder)), read_run(Path("again", folder))
        assert before.config == again.config
        assert [record.loss for record in before.records] == [record.loss for record in again.records]
    assert Path("two.yaml").read_text() == "preset: quickstart\n"


def test_variations_are_told_apart_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for count in (9, 10, 12):
        for method in ("fedlalr", "fedavg"):
            make_run(
                tmp_path / f"clients_per_round={count}" / method, f"algorithm={method}", f"clients_per_round={count}"
            )
    words = checked(page([read_run(path) for path in find_runs([tmp_path])])).words
    rows = [word for word in words if word.startswith("FedLALR, ")]
    assert rows[:3] == [f"FedLALR, clients_per_round {count}" for count in (9, 10, 12)]
    (subtitle,) = [word for word in words if word.startswith("digits on 100 clients")]
    assert subtitle.endswith("; FedLALR · FedAvg in 6 variants; 6 runs")


def test_refused_replies_of_a_round_that_failed_are_counted_and_named(tmp_path: Path) -> None:
    with pytest.raises(fl.RoundFailed):
        make_run(tmp_path, "algorithm=fedavg", "algorithm.lr=1e30")
    run = read_run(tmp_path)
    ((*_, refused, state),) = runs_table(group_runs([run])).rows
    assert (refused, state) == ("4", "failed")
    table = rejections_table(group_runs([run]))
    assert table is not None
    assert [row[4:] for row in table.rows] == [("1", "1")] * 4
    assert "No reply was rejected" not in page([run])


def test_many_methods_are_counted_under_the_title(comparison_folder: Path) -> None:
    run = read_run(comparison_folder / "fedavg" / "seed-0")
    runs = [
        replace(run, config=load("quickstart", [f"algorithm={name}"]), path=Path(name))
        for name in ("fedavg", "fedlalr", "fedadam", "fedyogi")
    ]
    assert "FedLALR · FedAvg · FedAdam; 3 runs</p>" in page(runs[:3])
    assert "; 4 methods; 4 runs</p>" in page(runs)


def test_a_run_whose_directory_lost_its_configuration_has_no_command(comparison_folder: Path) -> None:
    run = read_run(comparison_folder / "fedavg" / "seed-0")
    assert run.config is not None
    mine = Config.model_validate(run.config.model_dump() | {"name": "mine"})
    text = page([ReportedRun(Path("gone"), run.records, mine)])
    assert "id='commands'" not in text
    assert "gone no longer has the configuration" in text


def test_the_command_writes_the_page_where_it_is_told(comparison_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(comparison_folder), "-o", str(tmp_path / "new" / "page.html")])
    assert result.exit_code == 0, result.output
    assert "FedLALR" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")


def test_without_an_output_the_page_lies_in_the_first_directory(comparison_folder: Path) -> None:
    one = comparison_folder / "fedavg" / "seed-1"
    result = CliRunner().invoke(app, ["report", str(one)])
    assert result.exit_code == 0, result.output
    assert (one / "report.html").is_file()


def test_the_command_refuses_a_place_without_runs(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert "contains no run" in result.output


def test_the_command_draws_accuracy_against_megabytes_up_and_down(comparison_folder: Path, tmp_path: Path) -> None:
    arguments = ["report", str(comparison_folder), "--figure", str(tmp_path / "sent.png"), "--title", "Digits"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    svg = (tmp_path / "sent.svg").read_text(encoding="utf-8")
    assert {"Digits", "FedLALR", "FedAvg", "megabytes up", "megabytes down"} <= set(
        re.findall(r">([^<>]+)</text>", svg)
    )
    assert CliRunner().invoke(app, [*arguments, "--target", "0.05"]).exit_code == 0
    assert "fewest megabytes to 5 %:" in (tmp_path / "sent.svg").read_text(encoding="utf-8")
    beyond = CliRunner().invoke(app, [*arguments, "--target", "5"])
    assert beyond.exit_code == 2
    assert "--target must be an accuracy" in " ".join(beyond.stderr.split())
    printed = CliRunner().invoke(app, ["report", str(comparison_folder), "--figure", str(tmp_path / "sent.pdf")])
    assert printed.stdout.split() == ["written", "to", str(tmp_path / "sent.pdf")]
    assert (tmp_path / "sent.pdf").read_bytes().startswith(b"%PDF")
    both = CliRunner().invoke(app, [*arguments, "-o", str(tmp_path / "page.html")])
    assert both.exit_code == 2
    assert "give one of the two" in " ".join(both.stderr.split())
    wrong = CliRunner().invoke(app, ["report", str(comparison_folder), "--figure", str(tmp_path / "sent.txt")])
    assert wrong.exit_code == 2
    assert "must end in one of" in " ".join(wrong.stderr.split())
