import time
from pathlib import Path

import pytest
from rich.console import Console

from fedlalr import config
from fedlalr.cli.progress import GridProgress, work
from fedlalr.config.jobs import Event, Job, run_jobs

SMALL = ("rounds=2", "partition.clients=12", "clients_per_round=2", "local.steps=1", "engine=reference")


def jobs(folder: Path, count: int = 2) -> list[Job]:
    return [Job(config.load("quickstart", [*SMALL, f"seed={seed}"]), folder / f"seed-{seed}") for seed in range(count)]


def recorded(job: Job, rounds: int, *changes: str) -> None:
    """The files of a run after some rounds."""
    job.directory.write_config(config.load("quickstart", [*SMALL, f"seed={job.config.seed}", *changes]))
    (job.folder / "metrics.jsonl").write_text("{}\n" * rounds)


def test_work_counts_samples_and_their_cost() -> None:
    cifar = config.load("cifar10")
    assert work(cifar) == 100 * 50 * 5 * 500
    assert work(config.load("cifar10", ["local.steps=10"])) == 100 * 50 * 10 * 50
    assert work(config.load("cifar10", ["local={start: 3, base: 4.0}"])) == 100 * 50 * 3 * 50
    assert work(config.load("shakespeare")) == 100 * 10 * 5 * 2000
    assert work(config.load("shakespeare", ["data.options={train: 400}", "partition.clients=20"])) == 100 * 10 * 5 * 400
    small = config.load("quickstart", ["local.steps=1"])
    assert work(small) < 40 * 10 * 10


def test_the_time_left_follows_from_the_rounds_since_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = jobs(tmp_path)
    recorded(first, 1)  # of an interrupted run: not done now
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = GridProgress(Console(quiet=True), [first, second], tmp_path, quiet=True)
    now = 110.0
    assert progress.left() is None
    recorded(first, 2)
    assert progress.left() == pytest.approx(20)  # one of three rounds took ten seconds
    recorded(second, 1)
    assert progress.left() == pytest.approx(5)


def test_rounds_with_other_settings_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs(tmp_path, 1)
    recorded(job, 2, "weight_decay=0.1")
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = GridProgress(Console(quiet=True), [job], tmp_path, quiet=True)
    recorded(job, 1)
    progress.show(Event(0, 1, running=[job]))
    now = 110.0
    assert progress.left() == pytest.approx(10)


def test_a_terminal_shows_a_bar_with_the_current_run(tmp_path: Path) -> None:
    console = Console(force_terminal=True, width=120, record=True)
    (job,) = jobs(tmp_path, 1)
    with GridProgress(console, [job], tmp_path, quiet=False) as progress:
        progress.show(Event(0, 1, running=[job]))
        recorded(job, 1)
        time.sleep(0.8)
    assert "0/1 runs" in console.export_text(clear=False)
    assert "seed-0 1/2" in console.export_text()


def test_without_a_terminal_every_run_is_a_line_with_the_time_left(tmp_path: Path) -> None:
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    both = jobs(tmp_path)
    with GridProgress(console, both, tmp_path, quiet=False) as progress:
        run_jobs(both, 1, progress.show)
    first, second = console.export_text().splitlines()
    assert first.startswith("1/2  seed-0: accuracy")
    assert first.endswith("left")
    assert second.startswith("2/2  seed-1: accuracy")


def test_failures_are_kept_and_shown(tmp_path: Path) -> None:
    console = Console(width=120, record=True, file=(tmp_path / "out").open("w"))
    bad = Job(config.load("quickstart", [*SMALL, "algorithm=fedavg", "algorithm.lr=1e30"]), tmp_path / "bad")
    with GridProgress(console, [bad], tmp_path, quiet=False) as progress:
        run_jobs([bad], 1, progress.show)
    assert "bad: failed, round " in console.export_text()
    assert list(progress.failed) == [bad.folder]
