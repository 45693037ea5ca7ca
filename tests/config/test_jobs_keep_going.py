import multiprocessing
from pathlib import Path

import pytest

from fedlalr import config
from fedlalr.cli.errors import FAILED, exit_code
from fedlalr.config.jobs import Event, Job, ProcessDied, run_jobs
from settings import replaced

SMALL = ("rounds=2", "partition.clients=12", "clients_per_round=2", "local.steps=1", "engine=reference")


def job(folder: Path, *overrides: str) -> Job:
    return Job(config.load("quickstart", replaced(SMALL, overrides)), folder)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_an_error_is_the_failure_of_its_run_alone_and_is_tried_again(tmp_path: Path, workers: int) -> None:
    jobs = [job(tmp_path / "bad", "clients_per_round=50"), job(tmp_path / "good")]
    bad, good = run_jobs(jobs, workers, lambda event: None, keep_going=True)
    assert bad["status"] == "failed"
    assert bad["failure"].startswith("ConfigError: ")
    assert good["status"] == "finished"
    assert jobs[0].directory.summary() is None


class KillOne:
    """Kills a process as soon as one of its runs has come somewhere."""

    def __init__(self) -> None:
        self.killed: int | None = None

    def __call__(self, event: Event) -> None:
        if self.killed is None and any(one.rounds_done() for one in event.running):
            victim = multiprocessing.active_children()[0]
            victim.kill()
            self.killed = victim.pid


def long_jobs(folder: Path) -> list[Job]:
    return [job(folder / str(seed), f"seed={seed}", "rounds=200") for seed in range(4)]


@pytest.mark.faults
def test_a_process_that_dies_is_told_where_nothing_goes_on(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match="died, or one beside it: it was killed, out of memory or crashed") as told:
        run_jobs(long_jobs(tmp_path), 2, KillOne())
    assert exit_code(told.value) == FAILED
    again = run_jobs(long_jobs(tmp_path), 1, lambda event: None)
    assert [summary["status"] for summary in again] == ["finished"] * 4


@pytest.mark.faults
def test_a_process_that_dies_takes_only_the_runs_beside_it(tmp_path: Path) -> None:
    jobs, kill_one = long_jobs(tmp_path), KillOne()
    summaries = run_jobs(jobs, 2, kill_one, keep_going=True)
    dead = [summary for summary in summaries if summary["status"] == "failed"]
    assert kill_one.killed
    assert 1 <= len(dead) <= 2
    assert {summary["failure"] for summary in dead} == {"its process died, or one beside it"}
    again = run_jobs(jobs, 1, lambda event: None, keep_going=True)
    assert [summary["status"] for summary in again] == ["finished"] * 4
