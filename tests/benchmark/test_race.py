"""Races: contestants take turns, and the plain loop does the same job as this library."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fedlalr as fl
from fedlalr.benchmark import GPU_JOBS, JOBS, Contestant, RaceResult, race, turns
from fedlalr.benchmark.plain import plain_round
from fedlalr.benchmark.results import as_dict, method_table, plot_races, report, table
from fedlalr.cli import app

CONTESTANT = """
import sys, time
sys.path.insert(0, {folder!r})
from turns import Turns
turns, mark, work, file = Turns(), sys.argv[1], float(sys.argv[2]), sys.argv[3]
print("a library that prints")
turns.ready()
while True:
    began = time.perf_counter()
    while time.perf_counter() - began < work:
        pass
    with open(file, "a") as log:
        log.write(mark)
    turns.lap()
"""


def contestant(mark: str, work: float, file: Path) -> Contestant:
    script = CONTESTANT.format(folder=str(Path(turns.__file__).parent))
    return Contestant(mark, (sys.executable, "-c", script, mark, str(work), str(file)))


def test_contestants_take_turns_and_the_longer_one_comes_out_longer(tmp_path: Path):
    file = tmp_path / "order"
    quick, slow = race([contestant("a", 0.01, file), contestant("b", 0.05, file)], rounds=3, warm_up=1)
    assert file.read_text() == "ab" + "ababab"
    assert len(quick.seconds) == len(slow.seconds) == len(slow.processor) == 3
    assert min(quick.seconds) >= 0.01
    assert min(slow.seconds) >= 0.05
    assert min(quick.memory, slow.memory, quick.startup, slow.startup) > 0


def test_a_contestant_that_gives_up_is_named_with_its_error():
    broken = Contestant("broken", (sys.executable, "-c", "raise ValueError('no such thing')"))
    with pytest.raises(RuntimeError, match=r"broken failed:(.|\n)*no such thing"):
        race([broken])


@pytest.mark.parametrize("name", JOBS | GPU_JOBS)
def test_the_plain_loop_and_this_library_do_the_same_job(name):
    job = replace(
        (JOBS | GPU_JOBS)[name], clients=3, samples=4, batch=4, epochs=2, cohort=3
    )  # a whole batch: no order matters
    if job.sequence:
        network = partial(job.network.func, 11, 8, 16, 2, 2, **job.network.keywords)
        job = replace(job, network=network, sample=(8,), classes=11, vocabulary=11)
    plain = plain_round(job, job.model(), job.data(), [0, 1, 2])
    ours = fl.run(
        job.model(),
        job.data(),
        fl.FedAvg(lr=job.lr),
        rounds=1,
        local=fl.Epochs(job.epochs),
        batch_size=job.batch,
        engine="reference",
        device="cpu",
    )
    start = job.model().state_dict()
    for parameter, value in ours.state["x"].items():
        torch.testing.assert_close(value, plain.state_dict()[parameter], rtol=1e-4, atol=1e-6)
        assert not torch.equal(value, start[parameter])


def outcomes() -> list[RaceResult]:
    base = RaceResult("plain loop", (2.0, 4.0, 6.0), 1.5, 100 * 10**6, (2.0, 4.0, 6.0))
    return [base, RaceResult("fedlalr, auto", (1.0, 1.0, 3.0), 2.5, 200 * 10**6, (2.0, 2.0, 6.0))]


def test_a_ratio_is_the_median_over_rounds_that_followed_each_other():
    base, mine = outcomes()
    assert mine.ratio(base) == 0.5
    assert base.ratio(base) == 1
    assert mine.processor_ratio(base) == 10 / 12


def test_the_table_has_a_row_for_each_and_a_dash_where_one_did_not_run(tmp_path: Path):
    races = {"cnn": outcomes(), "lstm": outcomes()[:1]}
    assert table(races).splitlines() == [
        "| | cnn, × plain loop | lstm, × plain loop | start-up s | MB |",
        "|---|---|---|---|---|",
        "| plain loop | 1 (4 s) | 1 (4 s) | 1.5 | 100 |",
        "| fedlalr, auto | 0.50 (0.83) | – | 2.5 | 200 |",
    ]
    assert as_dict(races)["ratios"]["cnn"] == {"plain loop": 1, "fedlalr, auto": 0.5}
    plot_races(races, tmp_path / "folder" / "race.png")
    assert (tmp_path / "folder" / "race.png").stat().st_size > 5000


def test_a_method_is_compared_with_fedavg_on_the_same_engine():
    adaptive = RaceResult("fedlalr, auto, fedlalr", (1.0, 2.0, 6.0), 2.5, 200 * 10**6, (2.0, 4.0, 6.0))
    assert method_table({"cnn": [*outcomes(), adaptive]}).splitlines()[2:] == [
        "| cnn | fedlalr, auto | fedlalr | 2.00 (1.20) |"
    ]
    assert not method_table({"cnn": outcomes()})


def test_a_report_names_versions_and_threads():
    *_, line = report({"cnn": outcomes()}, threads=2).splitlines()
    assert f"2 threads per process, Python {sys.version.split()[0]}, torch {torch.__version__}" in line


def test_a_device_that_is_not_here_is_refused_before_anything_starts():
    done = CliRunner().invoke(app, ["bench", "--device", "tpu:7"])
    assert done.exit_code == 2
    assert "tpu" in done.output


@pytest.mark.slow
def test_the_command_times_a_job():
    options = ["--rounds", "1", "--engines", "reference", "--methods", "fedlalr", "--json", "--quiet"]
    done = CliRunner().invoke(app, ["bench", "logistic", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(found["ratios"]["logistic"]) == ["plain loop", "fedlalr, reference, fedlalr"]
    assert found["machine"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "nothing"], "must be one of"),
        (["bench", "cnn", "--engines", "warp"], "there is no engine 'warp'"),
        (["bench", "cnn", "--methods", "fedavg,fedmagic"], "there is no algorithm 'fedmagic'"),
    ],
)
def test_what_does_not_exist_is_refused(arguments, message):
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert message in done.stderr
