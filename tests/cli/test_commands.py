import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import fedlalr
from fedlalr import config
from fedlalr.cli import app
from fedlalr.cli.progress import fetch_progress
from fedlalr.cli.run import in_words
from fedlalr.federation.progress import duration, megabytes
from fedlalr.federation.session import RepliesRejected
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Replies, Work

SMALL = ("rounds=3", "partition.clients=12", "clients_per_round=3", "local.steps=2", "engine=reference")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_run_prints_plain_lines_without_a_terminal() -> None:
    result = cli("run", *SMALL, "--run-dir", "here")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        "FedLALR: 12 clients, 3 per round, 2,410 parameters; engine reference (requested) on cpu"
    )
    assert lines[3].startswith("round 3/3  accuracy ")
    for word in ("loss ", "rate ", " MB sent", " left"):
        assert word in lines[3]
    assert lines[-1].endswith("written to here")
    assert "\x1b" not in result.stdout


def test_the_run_directory_is_complete_and_repeats_the_run() -> None:
    cli("run", *SMALL, "--run-dir", "first")
    assert {"config.yaml", "metrics.jsonl", "summary.json", "checkpoint", "report.html"} <= set(os.listdir("first"))
    assert cli("run", "first/config.yaml", "--run-dir", "second").exit_code == 0
    first, second = (
        [json.loads(line)["loss"] for line in Path(f, "metrics.jsonl").read_text().splitlines()]
        for f in ("first", "second")
    )
    assert first == second
    assert len(first) == 3


def test_tilde_is_expanded_to_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cli("run", *SMALL, "--run-dir=~/one").exit_code == 0
    assert cli("resume", "~/one", "rounds=4", "-q").exit_code == 0
    assert (
        cli("compare", *SMALL, "--methods", "fedavg", "--seeds", "1", "--jobs", "1", "--run-dir=~/two").exit_code == 0
    )
    config.execute(config.load("quickstart", list(SMALL)), "~/three")
    assert {"one", "two", "three"} <= set(os.listdir("home"))
    assert {"config.yaml", "metrics.jsonl", "summary.json"} <= set(os.listdir("home/three"))
    assert os.listdir() == ["home"]


def test_a_run_name_cannot_escape_the_runs_folder() -> None:
    assert cli("run", "quickstart", "rounds=1", "name=../../away", "-q").exit_code == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("_.._away-fedlalr-")


def test_json_is_the_only_standard_output() -> None:
    result = cli("run", *SMALL, "--json", "--run-dir", "here")
    summary = json.loads(result.stdout)
    assert summary["status"] == "finished"
    assert summary["rounds"] == 3
    assert summary["run_dir"] == "here"
    assert result.stderr == ""


def test_quiet_shows_only_the_result() -> None:
    result = cli("run", *SMALL, "--quiet")
    assert len(result.stdout.splitlines()) == 2
    assert result.stdout.startswith("quickstart with fedlalr: accuracy")
    assert Path("runs").is_dir()


def test_the_preset_may_be_omitted_or_follow_the_settings() -> None:
    assert cli("run", *SMALL, "quickstart", "-q").exit_code == 0


def test_a_method_without_settings_in_the_preset_is_announced() -> None:
    result = cli("run", *SMALL, "algorithm=scaffold")
    assert "quickstart has no settings for scaffold" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "alpha=1"], 2, "Did you mean 'partition.alpha'?"),
        (["run", "quikstart"], 2, "Did you mean 'quickstart'?"),
        (["run", "quickstart", "cifar10"], 2, "write settings as key=value"),
        (["run", "clients_per_round=500"], 2, "there are only 100 clients"),
        (["run", *SMALL, "algorithm=fedavg", "algorithm.lr=1e30"], 1, "round"),
        (["run", "data.folder=nowhere"], 3, "nowhere does not exist"),
        (["resume", "nowhere"], 2, "there is no directory nowhere"),
        (["resume", "."], 2, ". contains no run: it has no config.yaml"),
        (["compare", "algorithm.lr=3"], 2, "methods.NAME.lr"),
        (["compare", "algorithm=fedavg"], 2, "--methods"),
        (["compare", "--methods", "fedavg,fedadm"], 2, "Did you mean 'fedadam'?"),
        (["compare", "--methods", ""], 2, "--methods '' contains an empty name"),
        (["compare", "--methods", "fedavg,"], 2, "--methods 'fedavg,' contains an empty name"),
        (["compare", "--methods", "fedlalr,fedlalr"], 2, "--methods contains fedlalr twice"),
        (["compare", "--target", "90"], 2, "--target must be an accuracy above 0 and at most 1, not 90"),
        (["data", "show", "digit"], 2, "Did you mean 'digits'?"),
        (["data", "fetch", "digit"], 2, "Did you mean 'digits'?"),
        (["data", "show", "digits", "--partition", "dirichle"], 2, "dirichlet"),
        (["data", "show", "digits", "--folder", "nowhere"], 3, "nowhere does not exist"),
        (
            ["data", "show", "digits", "--output", "x.foo"],
            2,
            "x.foo has no supported format; the name of a figure must end in one of .png, .svg, .pdf",
        ),
        (["data", "show", "digits", "--output", "/proc/q/x.png"], 2, "/proc/q/x.png cannot be written: No such file"),
        (["data", "show", "digits", "--output", "."], 2, "--output . is a folder"),
        (["run", "rounds=" + "9" * 5000], 2, "cannot be read: Exceeds the limit"),
        (["run", "reduce=" + "[" * 3000], 2, "cannot be read: maximum recursion depth"),
        (["compare", "--vary", "rounds=" + "9" * 5000], 2, "cannot be read: Exceeds the limit"),
        (["run", "q" * 300], 2, "cannot be used: File name too long"),
        (["run", *SMALL, "--run-dir", "q" * 300], 2, "cannot be used: File name too long"),
        (["report", "q" * 300], 2, "File name too long"),
        (["bench", "--plot", "races"], 2, "--plot races has no supported format"),
    ],
)
def test_exit_codes_and_messages(arguments: list[str], code: int, message: str) -> None:
    result = cli(*arguments)
    assert result.exit_code == code, result.output
    assert "error: " in result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", [["compare"], ["compare", "--grid"], ["reproduce", "cifar"]], ids=" ".join)
def test_too_many_seeds_are_rejected(command: list[str]) -> None:
    option = "--grid-seeds" if "--grid" in command else "--seeds"
    result = cli(*command, option, str(10**20))
    assert result.exit_code == 2
    assert option in result.stderr
    assert re.search(r"\b10000\b", result.stderr), result.stderr  # Typer words it, and the limit is ours


def test_runs_started_in_the_same_second_get_different_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    name = "name=" + "長" * 200
    for _ in range(3):
        assert cli("run", *SMALL, name, "-q").exit_code == 0
    assert cli("run", *SMALL, name, "clients_per_round=500").exit_code == 2
    first, *others = sorted(folder.name for folder in Path("runs").iterdir())
    assert others == [f"{first}-2", f"{first}-3"]


def test_a_file_named_runs_is_a_one_line_error() -> None:
    Path("runs").write_text("mine")
    result = cli("run", *SMALL)
    assert result.exit_code == 2
    assert "error: runs cannot be written: File exists; choose another path with --run-dir" in result.stderr


def test_a_misspelt_command_gets_one_suggestion() -> None:
    result = cli("runn")
    assert result.exit_code == 2
    assert result.stderr.count("Did you mean 'run'?") == 1


def test_programming_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("fedlalr.config.execute", broken)
    assert isinstance(cli("run", *SMALL).exception, ZeroDivisionError)


def test_an_interrupt_exits_with_130_and_says_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedlalr.federation.progress import RunProgress

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "on_round", interrupt)
        result = cli("run", *SMALL, "--run-dir", "here")
    assert result.exit_code == 130
    assert "resume with: fedlalr resume here" in result.stdout
    assert result.output.count("interrupted") == 1
    result = cli("resume", "here", "--json")
    assert json.loads(result.stdout)["rounds"] == 3
    assert cli("resume", "here", "rounds=5", "-q").exit_code == 0
    assert len(Path("here/metrics.jsonl").read_text().splitlines()) == 5


def test_a_run_interrupted_in_its_first_round_does_not_look_diverged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedlalr.training.engines.reference.ReferenceEngine.train", interrupt)
    result = cli("run", *SMALL, "--run-dir", "here")
    assert result.exit_code == 130
    assert "fedlalr: no round was finished\n" in result.stdout
    assert "resume with: fedlalr resume here" in result.stdout
    assert "finite" not in result.output


@pytest.mark.parametrize("command", [("run", *SMALL, "--run-dir"), ("resume",)], ids=["run", "resume"])
def test_a_run_directory_that_is_a_file_is_rejected(command: tuple[str, ...]) -> None:
    Path("here").touch()
    result = cli(*command, "here")
    assert result.exit_code == 2
    assert "here is a file, but a directory is required" in result.stderr


def test_a_resumed_run_counts_the_bytes_of_all_rounds() -> None:
    whole = cli("run", *SMALL[1:], "rounds=4", "--run-dir", "whole").stdout
    cli("run", *SMALL, "--run-dir", "here")
    resumed = cli("resume", "here", "rounds=4").stdout
    (expected,) = (line for line in whole.splitlines() if line.startswith("round 4/4"))
    (line,) = (line for line in resumed.splitlines() if line.startswith("round 4/4"))
    assert line.split(" MB sent")[0] == expected.split(" MB sent")[0]


def test_a_run_started_from_python_must_be_resumed_from_python() -> None:
    pair = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    fedlalr.run(torch.nn.Linear(4, 3), [pair], fedlalr.FedAvg(0.1), rounds=1, run_dir="mine")
    result = cli("resume", "mine")
    assert result.exit_code == 2
    assert "was started from Python" in result.stderr
    assert "fl.run(…, run_dir='mine', resume=True)" in result.stderr


def test_a_folder_of_runs_is_resumed_by_repeating_its_command() -> None:
    assert cli("run", *SMALL, "-q", "--run-dir", "all/fedlalr/seed-0").exit_code == 0
    result = cli("resume", "all")
    assert result.exit_code == 2
    assert "all is no run, but contains some, such as all/fedlalr/seed-0. Give one of them; to" in result.stderr
    assert "repeat its `fedlalr compare` command" in result.stderr


def test_rejected_replies_are_counted_and_the_first_reason_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    train = ReferenceEngine.train

    def broken(engine: ReferenceEngine, work: Work) -> Replies:
        replies = train(engine, work)
        replies.slots.x[0] = torch.nan
        return replies

    monkeypatch.setattr(ReferenceEngine, "train", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RepliesRejected)
        result = cli("run", *SMALL, "--run-dir", "here")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(
        r"warning: round 1 rejected the reply of client \d+ \(x is not finite\); run with --debug .*\n", result.stderr
    )
    assert "replies rejected; written to here" in result.stdout


def test_a_directory_with_a_run_is_rejected_without_overwrite() -> None:
    assert cli("run", *SMALL, "-q", "--run-dir", "here").exit_code == 0
    rejected = cli("run", *SMALL, "-q", "--run-dir", "here")
    assert rejected.exit_code == 2
    assert "--overwrite" in rejected.stderr
    assert cli("run", *SMALL, "-q", "--run-dir", "here", "--overwrite").exit_code == 0


def test_printed_commands_quote_the_folder() -> None:
    assert cli("run", *SMALL, "-q", "--run-dir", "two words").exit_code == 0
    assert "`fedlalr resume 'two words'`" in cli("run", *SMALL, "--run-dir", "two words").stderr
    summary = json.loads(Path("two words/summary.json").read_text()) | {"status": "interrupted"}
    lines = in_words(summary, [], Path("two words"))
    assert lines[-1] == "interrupted; resume with: fedlalr resume 'two words'"


def test_brackets_in_names_and_folders_are_not_markup() -> None:
    result = cli("run", *SMALL, "-q", "name='a [bold]b'", "--run-dir", "here[/old]")
    assert result.exit_code == 0, result.output
    assert "a [bold]b with fedlalr" in result.stdout
    assert "written to here[/old]" in result.stdout


def test_one_round_is_singular() -> None:
    assert "after 1 round\n" in cli("run", *SMALL[1:], "rounds=1", "-q").stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("run", "What to run (default: quickstart)"),
        ("resume", "rounds=N, to extend the run."),
        ("reproduce", "Settings to change in every run."),
        ("report", "Run directories, or a directory that contains several."),
        ("bench", "Benchmarks to run: cnn, lstm"),
        ("data fetch", "A data set; see `fedlalr data list`."),
        ("flower export", "Folder for the app: new or empty."),
    ],
)
def test_help_describes_the_arguments(command: str, words: str) -> None:
    assert words in CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command.split(), "--help"]).stdout


@pytest.mark.parametrize("width", [60, 100])
def test_paragraphs_of_help_fill_the_line(width: int) -> None:
    shown = CliRunner(env={"COLUMNS": str(width)}).invoke(app, ["compare", "--help"]).stdout
    lines = [line.strip() for line in shown.splitlines()]
    first = lines.index(next(line for line in lines if line.startswith("Runs are written to")))
    paragraph = lines[first : lines.index("", first)]
    for line, following in itertools.pairwise(paragraph):
        assert len(line) + 1 + len(following.split()[0]) > width - 2, f"{following!r} should continue the line {line!r}"


def test_help_has_examples() -> None:
    assert "fedlalr run quickstart algorithm=fedadam" in cli("run", "--help").stdout
    assert "fedlalr compare quickstart --seeds 3" in cli("compare", "--help").stdout
    assert "Exit codes" in cli("--help").stdout
    assert cli("--version").stdout == f"fedlalr {fedlalr.__version__}\n"


def test_help_names_a_default_preset_only_where_there_is_one() -> None:
    assert "quickstart)" in cli("run", "--help").stdout
    assert "quickstart" not in cli("presets", "--help").stdout


def test_presets_are_listed_and_shown_with_all_settings() -> None:
    listed = cli("presets").stdout
    for name in config.presets():
        assert name in listed
    Path("mine.yaml").write_text(cli("presets", "cifar10", "algorithm=fedadam").stdout, encoding="utf-8")
    assert config.load("mine.yaml") == config.load("cifar10", ["algorithm=fedadam"])


@pytest.mark.skipif(os.name != "posix", reason="streams as POSIX has them")
def test_a_run_with_closed_streams_writes_its_files() -> None:
    command = [sys.executable, "-m", "fedlalr", "run", *SMALL, "--run-dir", "quiet"]
    closed = f"{shlex.join(command)} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", closed], capture_output=True).returncode == 0
    assert [record.round for record in config.RunDirectory("quiet").records()] == [1, 2, 3]


def test_on_a_terminal_the_progress_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    from fedlalr.federation.progress import RunProgress

    console = Console(force_terminal=True, width=120, record=True)
    with RunProgress(console) as progress:
        config.execute(config.load("quickstart", SMALL), None, [progress])
    text = console.export_text()
    assert "3/3" in text
    assert "MB sent" in text


def test_long_runs_print_about_a_hundred_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from fedlalr.federation import Record, RunInfo
    from fedlalr.federation.progress import RunProgress

    progress = RunProgress(Console(width=130))
    progress.on_start(RunInfo("FedAvg", "reference", "requested", "cpu", 1000, 1, 10, 10, 5))
    for round in range(1, 1001):
        progress.on_round(Record(round, 1.0, None, 1.0, 0.1, 0.1, 1, 1, 10))
    assert 100 <= len(capsys.readouterr().out.splitlines()) <= 103


@pytest.mark.parametrize(("seconds", "text"), [(150_000.0, "takes about 42 hours on this CPU"), (60.0, ""), (None, "")])
def test_a_long_run_on_a_cpu_gets_a_warning(
    seconds: float | None, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from fedlalr.federation import RunInfo
    from fedlalr.federation.progress import RunProgress

    info = RunInfo("FedAvg", "workers", "heavy", "cpu", 100, 1, 10, 10, 5, seconds=seconds)
    RunProgress(Console(width=200)).on_start(info)
    _, *more = capsys.readouterr().out.splitlines()
    assert bool(more) == bool(text)
    assert all(text in line and "device=cuda" in line and "rounds=2" in line for line in more)


def test_downloads_print_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    with fetch_progress(Console(width=130), quiet=False) as show:
        assert show is not None
        for done in (0, 500_000, 2_000_000):
            show("downloading images", done, 2_000_000)
    assert capsys.readouterr().out.splitlines() == ["downloading images (2.0 MB)"]
    with fetch_progress(Console(width=130), quiet=True) as show:
        assert show is None


def test_sizes_and_durations_are_readable() -> None:
    assert megabytes(2_500_000_000) == "2.50 GB"
    assert duration(59.6) == "1:00"


def test_a_report_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path):
    folder = tmp_path / "run"
    (folder / "report.html").mkdir(parents=True)
    done = CliRunner().invoke(app, ["run", "quickstart", "rounds=1", "--run-dir", str(folder), "--quiet"])
    assert done.exit_code == 0, done.output
    assert f"write it with: fedlalr report {shlex.quote(str(folder))}" in done.output.replace("\n", "")


def test_a_report_path_that_is_a_folder_is_a_one_line_error() -> None:
    cli("run", *SMALL, "--run-dir", "here", "-q")
    Path("pages").mkdir()
    result = cli("report", "here", "-o", "pages")
    assert result.exit_code == 2
    assert result.stderr == "error: --output pages is a folder; name the page in it, such as pages/report.html\n"
    result = cli("report", "here", "-o", "/proc/q/page.html")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: /proc/q/page.html cannot be written: No such file")
    assert result.stderr.endswith("; choose another path with --output\n")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.validation=0.9999", "holds out all 1,"),
        ("model.hidden=2000000000", "model: a mlp of this size does not fit into memory"),
    ],
)
def test_settings_that_leave_nothing_to_train_are_a_one_line_error(setting: str, message: str) -> None:
    result = cli("run", "quickstart", setting)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_personal_parameters_are_a_setting_and_the_quality_over_the_clients_is_shown(tmp_path: Path) -> None:
    settings = ["personal=[layers.2.*]", "holdout=0.2", "rounds=1", "clients_per_round=2", "local.steps=1"]
    done = CliRunner().invoke(app, ["run", "quickstart", *settings, "engine=reference", "--run-dir", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert re.search(r"over clients accuracy [\d.]+% ± [\d.]+% \(worst 10 %: [\d.]+%\), training loss", done.output)
    loaded = config.load(tmp_path / "config.yaml")
    assert (loaded.personal, loaded.holdout, loaded.evaluate_every) == (["layers.2.*"], 0.2, 10)
    assert json.loads((tmp_path / "summary.json").read_text())["per_client"]["loss"]["clients"] == 100
