import multiprocessing
import os
import signal
import subprocess
import sys
import time
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
def test_an_error_fails_only_its_run_which_is_tried_again(tmp_path: Path, workers: int) -> None:
    jobs = [job(tmp_path / "bad", "partition.clients=5000"), job(tmp_path / "good")]
    bad, good = run_jobs(jobs, workers, lambda event: None, keep_going=True)
    assert bad["status"] == "failed"
    assert bad["failure"].startswith("ConfigError: ")
    assert good["status"] == "finished"
    assert jobs[0].directory.summary() is None


class KillOne:
    """Kills a process as soon as one of its runs has finished a round."""

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
def test_a_dead_process_is_an_error_without_keep_going(tmp_path: Path) -> None:
    with pytest.raises(ProcessDied, match="or a parallel one died: it was killed, out of memory, or crashed") as died:
        run_jobs(long_jobs(tmp_path), 2, KillOne())
    assert exit_code(died.value) == FAILED
    again = run_jobs(long_jobs(tmp_path), 1, lambda event: None)
    assert [summary["status"] for summary in again] == ["finished"] * 4


@pytest.mark.faults
def test_a_dead_process_fails_only_the_parallel_runs(tmp_path: Path) -> None:
    jobs, kill_one = long_jobs(tmp_path), KillOne()
    summaries = run_jobs(jobs, 2, kill_one, keep_going=True)
    dead = [summary for summary in summaries if summary["status"] == "failed"]
    assert kill_one.killed
    assert 1 <= len(dead) <= 2
    assert {summary["failure"] for summary in dead} == {"its process or a parallel one died"}
    again = run_jobs(jobs, 1, lambda event: None, keep_going=True)
    assert [summary["status"] for summary in again] == ["finished"] * 4


KILLED = """
import multiprocessing, os, signal, sys
from pathlib import Path
from config.test_jobs_keep_going import long_jobs
from fedlalr.config.jobs import run_jobs

def die_midway(event):
    if any(job.rounds_done() for job in event.running):
        Path(sys.argv[2]).write_text(" ".join(str(child.pid) for child in multiprocessing.active_children()))
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    run_jobs(long_jobs(Path(sys.argv[1])), 2, die_midway)
"""


def is_running(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes under /proc")
def test_no_process_outlives_a_killed_comparison(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    tests = str(Path(__file__).parents[1])
    killed = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs"), str(tmp_path / "workers")],
        stdout=subprocess.DEVNULL,  # with a pipe, run() would wait until the workers close it
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
    )
    assert killed.returncode == -signal.SIGKILL
    left = [Path("/proc") / pid for pid in (tmp_path / "workers").read_text().split()]
    assert len(left) == 2
    deadline = time.monotonic() + 30
    while any(map(is_running, left)):
        assert time.monotonic() < deadline, "a worker goes on though nobody waits for it"
        time.sleep(0.05)
