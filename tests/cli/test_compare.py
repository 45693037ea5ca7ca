import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedlalr.cli import app

SMALL = ("rounds=2", "partition.clients=12", "clients_per_round=2", "local.steps=1", "engine=reference")
DRAWN = {
    "test_the_six_methods_of_the_paper_are_compared_and_drawn",
    "test_the_plan_comes_first_and_every_block_names_its_variation",
}
"""Other figures are left empty."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def compare(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compare", "quickstart", *SMALL, "--jobs", "1", "--run-dir", "here", *arguments])


def test_the_six_methods_of_the_paper_are_compared_and_drawn() -> None:
    result = compare("--seeds", "2", "--target", "0.05")
    assert result.exit_code == 0, result.output
    for name in ("FedLALR", "FedAvg", "FedAdam", "FedAMSv1", "FedAMSv2", "LAFedOpt"):
        assert name in result.stdout
    for column in ("final accuracy", "rounds to 5%", "MB to 5%", "seconds to 5%", "difference to best"):
        assert column in result.stdout
    assert "12/12" in result.stdout
    for file in ("accuracy.png", "accuracy.svg", "table.md", "compare.json", "fedavg/seed-1/metrics.jsonl"):
        assert Path("here", file).stat().st_size > 0


def test_runs_are_reused_and_json_is_the_only_output() -> None:
    compare("--seeds", "1", "--methods", "fedavg")
    result = compare("--seeds", "2", "--methods", "fedavg,fedlalr")
    assert result.stdout.count("already finished") == 1
    plain = json.loads(compare("--seeds", "2", "--methods", "fedavg,fedlalr", "--json").stdout)
    assert {method["method"] for method in plain["methods"]} == {"fedavg", "fedlalr"}
    assert plain["seeds"] == 2
    assert plain["target"] == 0.9
    assert plain["figures"] == ["here/accuracy.png", "here/accuracy.svg"]


def test_a_methods_own_settings_can_be_changed() -> None:
    compare("--seeds", "1", "--methods", "fedavg,fedlalr", "methods.fedavg.lr=0.5", "methods.fedlalr.lr=0.25")
    plain = json.loads(Path("here/compare.json").read_text())
    assert {m["method"]: m["settings"]["lr"] for m in plain["methods"]} == {"fedavg": 0.5, "fedlalr": 0.25}


DEFAULTS = "default learning rates, not chosen for this problem; --grid tunes all methods."


def test_methods_without_chosen_rates_are_named_before_the_runs_and_with_the_table() -> None:
    methods = ("--seeds", "1", "--methods", "fedlalr,fedadamw,fedprox")
    lines = compare(*methods, "--vary", "partition.alpha=0.3,0.6").stdout.splitlines()
    told = f"FedAdamW, FedProx use {DEFAULTS}"
    assert lines[1] == told, "once for all variations"
    assert " ".join(lines[2:]).count(told) == 2, "under every table"
    for file in ("table.md", "compare.json", "partition.alpha-0.3/table.md"):
        assert told in Path("here", file).read_text()
    other = ["compare", "quickstart", *SMALL, *methods, "--jobs", "1", "--run-dir", "other", "methods.fedprox.lr=0.1"]
    assert json.loads(CliRunner().invoke(app, [*other, "--json"]).stdout)["notes"][-1] == f"FedAdamW uses {DEFAULTS}"
    assert f"FedAdamW uses {DEFAULTS}" in Path("other/report.html").read_text()


def test_tuned_methods_are_not_said_to_have_default_rates() -> None:
    grid = ("grid.fedadamw={lr: [3e-4]}", "grid.fedlalr={lr: [1e-2]}")
    result = compare("--grid", "--grid-seeds", "1", "--seeds", "1", "--methods", "fedlalr,fedadamw", *grid)
    assert result.exit_code == 0, result.output
    assert "default learning rates" not in result.stdout + Path("here/report.html").read_text()


def test_a_failing_method_is_shown_and_sets_the_exit_code() -> None:
    result = compare("--seeds", "1", "--methods", "fedavg,fedlalr", "methods.fedavg.lr=1e30")
    assert result.exit_code == 1
    assert "FedAvg failed: round" in result.stdout
    assert "FedLALR" in result.stdout


def test_failures_with_the_same_cause_are_shown_once() -> None:
    rates = ("methods.fedavg.lr=1e30", "methods.fedprox.lr=1e30")
    result = compare("--seeds", "2", "--methods", "fedavg,fedprox", *rates)
    assert result.stdout.count("failed, round") == 1
    assert result.stdout.count(": failed in the same way") == 3
    assert result.stdout.count("FedAvg, FedProx failed in 4 runs: round 2: 0 usable replies") == 1
    assert Path("here/table.md").read_text().count("failed in 4 runs") == 1


def test_a_warning_is_a_line_that_names_its_run() -> None:
    result = compare("--seeds", "1", "--methods", "fedavg", "schedule.warmup=5")
    told = [line for line in result.stderr.splitlines() if "warning" in line.lower()]
    assert len(told) == 1
    assert told[0].startswith("warning: here/fedavg/seed-0: Constant's warmup takes 5 rounds, but the run has only 2")


def test_an_interrupt_exits_with_130_and_says_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedlalr.config.jobs._work", interrupt)
        result = compare("--seeds", "1", "--methods", "fedavg")
    assert result.exit_code == 130
    assert result.stderr == "interrupted; repeat the command to resume\n"
    assert compare("--seeds", "1", "--methods", "fedavg").exit_code == 0


@pytest.mark.parametrize("command", [["compare", "quickstart", "--methods", "fedavg"], ["reproduce", "interval"]])
def test_a_run_directory_that_is_a_file_is_a_one_line_error(command: list[str]) -> None:
    Path("file").write_text("mine")
    result = CliRunner().invoke(app, [*command, "rounds=1", "--jobs", "1", "--seeds", "1", "--run-dir", "file"])
    assert result.exit_code in (1, 2), result.output
    assert isinstance(result.exception, SystemExit), "an error message, not a traceback"
    assert "file is a file, but a directory is required" in result.output


def test_a_run_with_a_corrupt_summary_resumes_from_its_checkpoint() -> None:
    compare("--seeds", "1", "--methods", "fedavg")
    summary = Path("here/fedavg/seed-0/summary.json")
    before = json.loads(summary.read_text())
    summary.write_text("{")
    assert compare("--seeds", "1", "--methods", "fedavg").exit_code == 0
    assert json.loads(summary.read_text())["accuracy"] == before["accuracy"]


def test_brackets_in_a_folder_are_not_markup() -> None:
    for folder in ("runs[old]", "runs[/b]"):
        arguments = ["compare", "quickstart", *SMALL, "--jobs", "1", "--seeds", "1", "--methods", "fedavg"]
        result = CliRunner().invoke(app, [*arguments, "--run-dir", folder])
        assert result.exit_code == 0, result.output
        assert f"Figure: {folder}/accuracy.png" in result.stdout.replace("\n", "")


@pytest.mark.parametrize("width", [30, 40, 60, 80, 130])
def test_a_narrow_terminal_truncates_no_word_of_the_table(width: int) -> None:
    from rich.console import Console

    from fedlalr.cli.compare_table import laid_out
    from fedlalr.report.tables import Table

    heading = (
        "method",
        "final accuracy, %",
        "difference to best [95 %]",
        "rounds to 90%",
        "MB to 90%",
        "seconds",
        "MB",
    )
    rows = (("LAFedOpt", "93.1 ± 1.6", "-2.3 [-38.0, +33.5]", "not reached", "not reached", "0.03 ± 0.00", "7.7"),)
    console = Console(width=width, record=True, markup=False, quiet=False, file=io.StringIO())
    console.print(laid_out(Table(heading, rows), "title", console))
    shown = console.export_text()
    assert "…" not in shown
    for word in " ".join((*heading[1:], *rows[0])).split():
        assert word in shown


def test_a_grid_chooses_rates_for_every_method_and_says_which() -> None:
    grid = ("grid.fedavg={lr: [1e-6, 0.5]}", "grid.fedlalr={lr: [1e-9, 1e-2]}")
    result = compare("--grid", "--grid-seeds", "1", "--seeds", "1", "--methods", "fedavg,fedlalr", *grid)
    assert result.exit_code == 0, result.output
    assert "Learning rates chosen from 2 settings per method" in result.stdout
    assert "fedavg: lr 0.5" in result.stdout
    assert "at the edge of the grid" in result.stdout
    assert "try others with grid.fedlalr.lr=[…] grid.fedavg.lr=[…], equally many for every method" in result.stdout
    plain = json.loads(Path("here/compare.json").read_text())
    assert {m["method"]: m["settings"]["lr"] for m in plain["methods"]} == {"fedavg": 0.5, "fedlalr": 0.01}
    assert len(plain["grid"]["fedavg"]["tried"]) == 2


def test_every_combination_of_varied_settings_is_compared() -> None:
    varied = ("--vary", "partition.alpha=0.1,10", "--vary", "partition=[dirichlet]")
    result = compare("--seeds", "1", "--methods", "fedavg,fedlalr", *varied, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)["variations"]
    assert [one["settings"] for one in printed] == [
        {"partition.alpha": alpha, "partition": "dirichlet"} for alpha in (0.1, 10)
    ]
    written = json.loads(Path("here/compare.json").read_text())["variations"]
    assert [one["methods"] for one in written] == [one["methods"] for one in printed]
    assert Path("here/table.md").read_text().count("| FedAvg |") == 2
    assert Path("here/partition.alpha-10-partition-dirichlet/fedlalr/seed-0/metrics.jsonl").is_file()


def test_the_plan_comes_first_and_every_block_names_its_variation() -> None:
    grid = ("grid.fedavg={lr: [0.1, 0.5]}", "grid.fedlalr={lr: [1e-3, 1e-2]}")
    varied = ("--vary", "partition.alpha=0.1,10", "--methods", "fedavg,fedlalr")
    lines = compare("--grid", "--grid-seeds", "1", "--seeds", "2", *varied, *grid).stdout.splitlines()
    assert lines[0] == ("16 runs: 2 variations × (2 methods × 2 settings × 1 seed to tune, then 2 methods × 2 seeds)")
    assert lines[1] == "variation 1 of 2: partition.alpha=0.1"
    assert lines[2].startswith("1/4  partition.alpha-0.1/grid/fedlalr/lr-0.001/seed-1000: accuracy")
    assert "variation 2 of 2: partition.alpha=10" in lines
    title = "Dirichlet 10 (partition.alpha=10): mean and range of 2 seeds"
    assert title in Path("here/partition.alpha-10/accuracy.svg").read_text()


def test_the_heading_names_changed_settings_of_the_methods_compared() -> None:
    result = compare("--seeds", "1", "--methods", "fedavg", "methods.fedavg.lr=0.01", "methods.fedlalr.lr=0.5")
    heading = " ".join(result.stdout.split())
    assert "methods.fedavg.lr" in heading
    assert "methods.fedlalr.lr" not in heading


def test_runs_with_other_settings_are_not_replaced() -> None:
    compare("--seeds", "2", "--methods", "fedavg")
    before = Path("here/fedavg/seed-0/metrics.jsonl").read_bytes()
    other = compare("--seeds", "1", "--methods", "fedavg,fedlalr", "methods.fedavg.lr=0.25")
    assert other.exit_code == 2
    assert "here contains runs with other settings" in other.stderr
    assert "algorithm.lr was " in other.stderr
    assert "and is now 0.25" in other.stderr
    assert "another --run-dir, or delete here" in other.stderr
    assert Path("here/fedavg/seed-0/metrics.jsonl").read_bytes() == before
    assert not Path("here/fedlalr").exists()
    untuned = compare("--grid", "--seeds", "1", "--methods", "fedavg", "methods.fedavg.lr=0.25")
    assert untuned.exit_code == 2
    assert not Path("here/grid").exists()


def test_runs_with_fewer_rounds_can_be_extended() -> None:
    def to_round(rounds: int, *settings: str) -> Result:
        own = (f"rounds={rounds}", *SMALL[1:], *settings, "--methods", "fedavg", "--seeds", "1", "--run-dir", "here")
        return CliRunner().invoke(app, ["compare", "quickstart", *own])

    assert to_round(1).exit_code == 0
    assert "Extend each with fedlalr resume here/fedavg/seed-0 rounds=2, choose another" in to_round(2).stderr
    assert "delete here" in (other := to_round(2, "methods.fedavg.lr=0.25").stderr)
    assert "Extend" not in other
    assert CliRunner().invoke(app, ["resume", "here/fedavg/seed-0", "rounds=2"]).exit_code == 0
    assert "already finished" in to_round(2).stdout
    assert "Extend" not in to_round(1).stderr


def test_a_grid_over_any_option_can_be_repeated() -> None:
    grid = (
        "--grid",
        "--grid-seeds",
        "1",
        "--seeds",
        "1",
        "--methods",
        "fedlalr",
        "grid.fedlalr={lr: [0.01], eps: [0.1, 0.5]}",
    )
    assert compare(*grid).exit_code == 0
    again = compare(*grid)
    assert again.exit_code == 0, again.output
    assert again.stdout.count("already finished") == 3


def test_a_wider_grid_replaces_the_runs_of_the_previous_choice() -> None:
    def tuned(rates: str) -> Result:
        return compare(
            "--grid", "--grid-seeds", "1", "--seeds", "1", "--methods", "fedavg", f"grid.fedavg={{lr: {rates}}}"
        )

    assert tuned("[1e-6]").exit_code == 0
    wider = tuned("[1e-6, 0.5]")
    assert wider.exit_code == 0, wider.output
    assert "replacing 1 run with learning rates of an earlier tuning in here" in wider.stdout
    assert wider.stdout.count("already finished") == 1
    assert "replacing" not in tuned("[1e-6, 0.5]").stdout


@pytest.mark.parametrize(
    ("vary", "why"),
    [
        ("partition.alpha", "write KEY=A,B"),
        ("partition.alpha=", "separate the values with commas"),
        ("partition.alpha=0.1,0.1", "a value is given twice"),
        ("seed=1,2", "with --seeds"),
        ("rounds=[1", "cannot be read"),
        ("algorithm.lr=1,2", "methods.NAME.lr"),
        ("rounds=1,soon", "rounds cannot be 'soon'"),
        ("clients_per_round=10,1000", "only 100 clients"),
        ("schedule={name: cosine},{name: cosine, warmup: 99}", "Cosine's warmup takes 99 rounds"),
    ],
)
def test_invalid_variations_are_rejected_before_anything_runs(vary: str, why: str) -> None:
    result = CliRunner().invoke(app, ["compare", "quickstart", "--run-dir", "here", "--vary", vary])
    assert result.exit_code == 2
    assert why in result.output
    assert not Path("here").exists()


def test_a_setting_varied_twice_is_rejected() -> None:
    result = compare("--vary", "batch_size=1,2", "--vary", "batch_size=3,4")
    assert result.exit_code == 2
    assert "is varied twice" in result.output


def test_a_terminal_shows_a_bar_and_failures(tmp_path: Path) -> None:
    from rich.console import Console

    from fedlalr import config
    from fedlalr.cli.compare import Shown
    from fedlalr.config.jobs import Job

    console = Console(force_terminal=True, width=120, record=True)
    bad = config.load("quickstart", [*SMALL, "algorithm=fedavg", "algorithm.lr=1e30"])
    Shown(1, tmp_path, console, silent=False).run([Job(bad, tmp_path / "bad")])
    assert "bad: failed, round" in console.export_text()


def test_a_grid_with_an_invalid_value_is_rejected_before_anything_runs() -> None:
    grid = "preset: quickstart\ngrid: {fedavg: {lr: [0.1, -0.3]}, fedlalr: {lr: [0.1, 0.2]}}\n"
    Path("bad.yaml").write_text(grid, encoding="utf-8")
    result = CliRunner().invoke(app, ["compare", "bad.yaml", "--grid", "--methods", "fedavg,fedlalr"])
    assert result.exit_code == 2, result.output
    assert result.stderr == ("error: grid.fedavg.lr cannot be -0.3: lr must be a finite number above 0, not -0.3\n")
    assert not Path("runs").exists()


def test_a_method_is_compared_with_itself_compressed() -> None:
    result = compare("--seeds", "1", "--methods", "fedlalr,fedlalr+balanced", "methods.fedlalr.lr=0.02")
    assert result.exit_code == 0, result.output
    assert "FedLALR (balanced)" in result.stdout
    assert "methods.fedlalr+balanced" not in result.stdout
    records = [
        json.loads(Path("here", name, "seed-0", "metrics.jsonl").read_text().splitlines()[0])
        for name in ("fedlalr", "fedlalr+balanced")
    ]
    assert records[1]["bytes_up"] < records[0]["bytes_up"] / 4
    assert {record["lr"] for record in records} == {0.02}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--methods", "fedlalr+blanced"),
            "no compressed method 'fedlalr+blanced'; choose one of fedlalr+balanced",
        ),
        (("--methods", "fedlaler+balanced"), "there is no method 'fedlaler'"),
        (("--methods", "fedlalr+balanced", "--grid"), "--grid tunes methods without compression; remove +balanced"),
    ],
)
def test_an_unknown_or_tuned_compression_is_rejected(arguments: tuple[str, ...], message: str) -> None:
    result = compare(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
