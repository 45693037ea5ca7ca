"""`fedlalr reproduce` on tiny grids of real runs."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fedlalr.cli import app
from fedlalr.cli.reproduce import folder_name
from fedlalr.paper.figure_options import figures_for
from fedlalr.paper.plans import FIGURES
from fedlalr.paper.speedup import VARIANTS, Scale, measure
from fedlalr.paper.speedup_results import Speedup

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "paper-dtype-bfloat16"
TINY = ("rounds=2", "partition.clients=12", "clients_per_round=2", "local.steps=2", "engine=reference")
FOLDER = Path("here") / folder_name("smoke", TINY)
SHORT = tuple(text for text in TINY if not text.startswith("local"))
"""For the figure that sets the number of local steps."""
INTERVAL = Path("here") / folder_name("smoke", SHORT)
DRAWN = {"test_a_figure_has_data_and_verdicts_and_its_runs_are_reused_or_resumed"}
"""Other figures are left empty."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate folder, on a machine without any data set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLALR_DATA", str(tmp_path / "data"))


def reproduce(figure: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["reproduce", figure, "--jobs", "1", "--run-dir", "here", *arguments])


def test_a_figure_has_data_and_verdicts_and_its_runs_are_reused_or_resumed() -> None:
    result = reproduce("interval", *SHORT)
    assert result.exit_code == 0, result.output
    assert "Digits stand in for CIFAR-10" in result.stdout
    assert "Claim 4a" in result.stdout
    assert "early accuracy or loss: its mean over the first quarter of the rounds" in result.stdout
    assert "3/3" in result.stdout
    for kind in ("png", "svg", "pdf", "csv", "json"):
        assert (INTERVAL / f"interval.{kind}").stat().st_size > 0
    made = json.loads((INTERVAL / "interval.json").read_text())
    assert [run["status"] for run in made["runs"]] == ["finished"] * 3
    assert made["commands"][0].startswith("fedlalr")
    assert all("torch" in run["versions"] and run["hardware"] for run in made["runs"])
    verdicts = (INTERVAL / "verdicts.md").read_text()
    assert "| 4a | Interval 3 + ⌊log₄ t⌋ beats" in verdicts
    assert "Digits stand in for CIFAR-10 and CIFAR-100" in verdicts
    last = " ".join(result.stdout.rpartition("verdicts.md")[2].split())
    assert last.startswith("claim the paper's claim seeds verdict")
    assert "in steps:" in last

    runs = INTERVAL / "runs" / "digits-dirichlet0.6-2of12"
    interrupted, untouched = runs / "log-3-4" / "seed-0", runs / "steps-10" / "seed-0" / "metrics.jsonl"
    before, first = untouched.stat().st_mtime_ns, (interrupted / "metrics.jsonl").read_text().splitlines()[0]
    (interrupted / "summary.json").unlink()  # like a killed run
    assert "2 of 3 runs are complete" in reproduce("interval", *SHORT).stdout
    assert untouched.stat().st_mtime_ns == before
    assert (interrupted / "metrics.jsonl").read_text().splitlines()[0] == first
    assert (interrupted / "summary.json").exists()


@pytest.mark.slow
def test_a_figure_without_claims_prints_its_curves_as_numbers() -> None:
    result = reproduce("variants", *TINY)
    assert result.exit_code == 0, result.output
    assert "MB up" in result.stdout
    assert "seed 0" in result.stdout
    assert "restart, max" in result.stdout
    assert "Verdicts" not in result.stdout
    again = json.loads(reproduce("variants", *TINY, "--json").stdout)
    rows = again["numbers"]["variants"]
    assert [row["line"] for row in rows][:2] == ["average, mean", "restart, mean"]
    assert all(0 <= row["final_accuracy"] <= 1 and row["final_accuracy_std"] is None for row in rows)
    assert all(row["seeds"] == [0] and row["megabytes_up"] > 0 for row in rows)
    several = reproduce("variants", *TINY, "--seeds", "2").stdout
    assert "variants, mean ± standard deviation over the seeds" in several


def test_a_failed_run_is_named_and_sets_the_exit_code_and_the_others_are_drawn() -> None:
    result = reproduce("cifar", *TINY, "methods.fedavg.lr=1e30", "--methods", "fedlalr,fedavg")
    assert result.exit_code == 1
    runs = ", ".join(f"digits-dirichlet{alpha}-2of12/fedavg/seed-0" for alpha in (0.6, 0.3))
    assert f"failed: {runs}: round 1" in result.stdout.replace("\n", " ")
    folder = Path("here") / folder_name("smoke", [*TINY, "methods.fedavg.lr=1e30"])
    assert "fedlalr" in (folder / "cifar.csv").read_text()
    assert "planned, not run: FedAdam" in (folder / "verdicts.md").read_text()


def test_an_error_other_than_a_failed_round_is_named_too() -> None:
    many = [text if not text.startswith("partition.clients") else "partition.clients=5000" for text in SHORT]
    result = reproduce("interval", *many)
    assert result.exit_code == 1
    assert "ConfigError" in result.stdout
    assert "cannot share" in " ".join(result.stdout.split())


def test_draw_only_needs_no_data_and_says_what_is_planned_and_how_to_run_it() -> None:
    folder = Path("here") / "paper-dtype-bfloat16"
    run = Path("runs") / "cifar10-dirichlet0.6-50of100" / "steps-10" / "seed-0"
    shutil.copytree(RESULTS / run, folder / run)
    result = reproduce("interval", "dtype=bfloat16", "--scale", "paper", "--draw-only")
    assert result.exit_code == 0, result.output
    output = " ".join(result.stdout.split())
    assert "CIFAR-100 is not on this machine" in output
    assert "interval: 5 planned, not run: cifar10-dirichlet0.6-50of100/epochs-10/seed-0, " in output
    planned = json.loads((folder / "interval.json").read_text())["planned"]
    assert len(planned["runs"]) == 5
    claims = {claim["key"]: claim for claim in json.loads((folder / "verdicts.json").read_text())}
    assert claims["4a"]["checks"][0]["measured"] == "planned, not run: 3 + ⌊log₄ t⌋, 4 + ⌊log₂ t⌋, K = 10"


def test_draw_only_runs_nothing_and_draws_nothing_without_runs() -> None:
    for figure in ("interval", "variants", "speedup"):
        result = reproduce(figure, *(SHORT if figure != "speedup" else ()), "--draw-only")
        assert result.exit_code == 3, result.output
        assert f"{figure}: nothing to draw yet; run it without --draw-only" in result.stdout
        assert "not measured" in result.stdout or figure == "variants"
        assert not Path("here").exists()


@pytest.mark.slow
def test_draw_only_keeps_the_provenance_of_the_runs() -> None:
    reproduce("variants", *TINY)
    path = FOLDER / "variants.json"
    ran = json.loads(path.read_text())
    assert ran["commands"] == [ran["drawn"]["command"]]
    assert ran["hardware"] == ran["runs"][0]["hardware"]
    assert ran["run_seconds"] == pytest.approx(sum(run["seconds"] for run in ran["runs"]))
    path.write_text(json.dumps({**ran, "commands": ["fedlalr first"], "hardware": "another machine"}))
    (FOLDER / "variants.png").unlink()
    result = reproduce("variants", *TINY, "--draw-only")
    assert result.exit_code == 0, result.output
    assert "4 of 4 runs are complete" in result.stdout
    assert (FOLDER / "variants.png").exists()
    kept = json.loads(path.read_text())
    assert (kept["commands"], kept["hardware"]) == (["fedlalr first"], "another machine")
    assert kept["drawn"] == ran["drawn"]
    reproduce("variants", *TINY)
    assert json.loads(path.read_text())["commands"] == ["fedlalr first", *ran["commands"]]
    path.unlink()
    reproduce("variants", *TINY, "--draw-only")
    unknown = json.loads(path.read_text())
    assert unknown["commands"] is unknown["hardware"] is unknown["versions"] is None
    assert unknown["drawn"]["hardware"]


@pytest.mark.slow
def test_draw_only_draws_the_saved_speedup_without_measuring() -> None:
    folder = Path("here/smoke")
    scale = Scale(steps=(2**8, 2**10), clients=(1, 2, 4), repeats=2)
    measured = measure(scale, folder=folder, variants=VARIANTS[:1])
    result = reproduce("speedup", "--draw-only")
    assert result.exit_code == 0, result.output
    assert (folder / "speedup.png").exists()
    assert Speedup.read(folder) == measured


@pytest.mark.slow
def test_the_trajectory_follows_two_clients() -> None:
    result = reproduce("trajectory", *TINY)
    assert result.exit_code == 0, result.output
    assert "Claim 6" in result.stdout
    lines = (FOLDER / "trajectory.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 2  # rounds, clients, steps


def test_heterogeneity_trains_nothing_and_json_is_the_only_standard_output() -> None:
    plain = json.loads(reproduce("heterogeneity", "--json").stdout)
    assert plain["claims"][0]["verdict"] == "holds, one seed (1 of 1 statements hold)"
    assert plain["claims"][0]["checks"][0]["seeds"] == [0]
    assert plain["failed"] == []
    assert all(Path(file).exists() for file in plain["files"]["heterogeneity"])


def test_changed_settings_get_a_separate_folder_independent_of_their_order() -> None:
    assert (
        folder_name("smoke", ["b=1", "a=[0, 1]"])
        == folder_name("smoke", ["a=[0, 1]", "b=1"])
        != folder_name("smoke", [])
    )
    assert "/" not in folder_name("smoke", ["data.folder=/somewhere/else"])
    many = [f"methods.fedavg.option{i}=1" for i in range(50)]
    assert len(folder_name("smoke", many)) < 40
    assert folder_name("smoke", many) != folder_name("smoke", many[1:])


def test_the_papers_scale_skips_missing_data() -> None:
    result = reproduce("cifar", "--scale", "paper", "--offline")
    assert result.exit_code == 3, result.output
    assert "CIFAR-10 is not on this machine and was left out." in result.stdout
    assert "cifar: no figure, its data set is missing" in result.stdout
    assert "not measured" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("algorithm=fedavg",), "choose methods with --methods"),
        (("--methods", "fedfoo"), "the paper has no method 'fedfoo'"),
        (("rouns=3",), "Did you mean 'rounds'"),
        (("--device", "cuda:99"), "device"),
        (("--device", "gpu"), "gpu"),
        (("--beside", "fedadam:serverlr=0.1"), "serverlr"),
        (("--beside", "fedadam"), "changes nothing"),
        (("--beside", "fedfoo:lr=1"), "no method 'fedfoo'"),
    ],
)
def test_invalid_requests_are_explained(arguments: tuple[str, ...], message: str) -> None:
    result = reproduce("cifar", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("figure", "override", "key"),
    [
        ("choices", "buffers=recalibrate", "buffers"),
        ("choices", "clip_norm=10", "clip_norm"),
        ("choices", "weighting=samples", "weighting"),
        ("choices", "model={norm: group}", "model.norm"),
        ("variants", "methods.fedlalr.momentum=restart", "methods.fedlalr.momentum"),
        ("heterogeneity", "partition.alpha=5", "partition.alpha"),
        ("interval", "local.steps=2", "local"),
        ("cifar", "partition={alpha: 5}", "partition.alpha"),
        ("cifar", "data=mnist", "data.name"),
        ("scalability", "clients_per_round=4", "clients_per_round"),
        ("scalability", "rounds=4", "rounds"),
        ("trajectory", "trajectory.clients=[3]", "trajectory"),
        ("shakespeare", "partition=iid", "partition.scheme"),
        ("all", "partition.alpha=5", "heterogeneity sets partition.alpha"),
        ("all", "local.epochs=1", "interval sets local"),
        ("speedup", "rounds=3", "takes no settings"),
        ("heterogeneity", "rounds=3", "only settings of data, partition, seed"),
    ],
)
def test_a_setting_that_the_figure_sets_or_compares_is_rejected(figure: str, override: str, key: str) -> None:
    result = reproduce(figure, override)
    assert result.exit_code == 2, result.output
    assert f"{override!r} cannot be used" in result.stderr
    assert key in result.stderr
    assert not Path("here").exists()


def test_all_skips_figures_that_compare_a_given_setting() -> None:
    every = list(FIGURES)
    names, sentences = figures_for(every, ["buffers=recalibrate", "clip_norm=10", "methods.fedlalr.momentum=restart"])
    assert names == [name for name in every if name not in ("choices", "variants")]
    assert sentences == [
        "choices is skipped because of buffers=recalibrate: choices compares runs that differ in buffers.",
        "variants is skipped because of methods.fedlalr.momentum=restart: "
        "variants compares runs that differ in methods.fedlalr.momentum.",
    ]
    assert figures_for(every, ["dtype=bfloat16", "engine=stacked"]) == (every, [])


@pytest.mark.parametrize(
    ("figure", "arguments", "message"),
    [
        ("choices", ("--methods", "fedavg"), "choices has runs of fedlalr alone"),
        ("trajectory", ("--methods", "fedlalr,fedavg"), "trajectory has runs of fedlalr alone"),
        ("heterogeneity", ("--methods", "fedlalr"), "heterogeneity trains no method"),
        ("interval", ("--beside", "fedadam:lr=0.1"), "interval does not show the methods side by side"),
    ],
)
def test_methods_that_a_figure_does_not_have_are_rejected(
    figure: str, arguments: tuple[str, ...], message: str
) -> None:
    result = reproduce(figure, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_the_device_is_checked_at_once_and_not_part_of_the_folder_name() -> None:
    for arguments in (("device=cuda:99",), ("device=cpu", "--device", "cuda:99")):
        result = reproduce("cifar", *arguments)
        assert result.exit_code == 2, result.output
        assert "device" in result.stderr
        assert not Path("here").exists()
    assert folder_name("paper", ["device=cuda", "dtype=bfloat16", "engine=stacked"]) == "paper-dtype-bfloat16"
    plain = json.loads(reproduce("heterogeneity", "device=cpu", "engine=reference", "--json").stdout)
    assert plain["run_dir"] == "here/smoke"


def test_an_unknown_figure_lists_the_known_ones() -> None:
    result = reproduce("cifra")
    assert result.exit_code == 2
    assert "heterogeneity" in result.stderr
