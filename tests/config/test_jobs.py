import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from fedlalr import config
from fedlalr.config.jobs import Event, Job, _start_worker, default_workers, run_jobs
from fedlalr.federation import Observer, Record
from fedlalr.federation.storage.journal import RunDirectoryError
from settings import replaced

SMALL = ("rounds=2", "partition.clients=12", "clients_per_round=2", "local.steps=1", "engine=reference")


def job(folder: Path, *overrides: str) -> Job:
    return Job(config.load("quickstart", replaced(SMALL, overrides)), folder)


def run(jobs: list[Job], workers: int = 1) -> list[Event]:
    events: list[Event] = []
    run_jobs(jobs, workers, events.append)
    return [event for event in events if event.over is not None]


def test_finished_runs_with_the_same_settings_are_reused(tmp_path: Path) -> None:
    jobs = [job(tmp_path / "0", "seed=0"), job(tmp_path / "1", "seed=1")]
    assert [event.reused for event in run(jobs)] == [False, False]
    written = (tmp_path / "0" / "metrics.jsonl").stat().st_mtime_ns
    assert [event.reused for event in run(jobs)] == [True, True]
    assert (tmp_path / "0" / "metrics.jsonl").stat().st_mtime_ns == written


def test_a_run_with_other_settings_is_repeated(tmp_path: Path) -> None:
    run([job(tmp_path)])
    (event,) = run([job(tmp_path, "algorithm.lr=0.1")])
    assert not event.reused
    assert job(tmp_path).directory.config().algorithm.options["lr"] == 0.1


def test_other_settings_of_other_methods_do_not_matter(tmp_path: Path) -> None:
    run([job(tmp_path)])
    (event,) = run([job(tmp_path, "methods.fedavg.lr=7", "target=0.5")])
    assert event.reused


def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    class Interrupts(Observer):
        def on_round(self, record: Record) -> None:
            raise KeyboardInterrupt

    one = job(tmp_path, "rounds=3")
    with pytest.raises(KeyboardInterrupt):
        config.execute(one.config, tmp_path, [Interrupts()])
    first = one.directory.records()
    (event,) = run([one])
    assert not event.reused
    assert one.directory.records()[:1] == first
    assert one.rounds_done() == 3


def test_a_failed_round_is_an_outcome_and_the_others_continue(tmp_path: Path) -> None:
    jobs = [job(tmp_path / "bad", "algorithm=fedavg", "algorithm.lr=1e30"), job(tmp_path / "good")]
    bad, good = run_jobs(jobs, 1, lambda event: None)
    assert bad["status"] == "failed"
    assert good["status"] == "finished"
    assert [event.reused for event in run(jobs)] == [True, True]


@pytest.mark.parametrize("content", [b"", b"null\n", b"[1]\n", b"\xff\n"], ids=["empty", "null", "list", "bytes"])
def test_a_finished_run_without_its_records_is_not_reused(tmp_path: Path, content: bytes) -> None:
    finished = job(tmp_path / "0")
    run([finished])
    (finished.folder / "metrics.jsonl").write_bytes(content)
    with pytest.raises(config.ConfigError, match=r"metrics.jsonl has \d bytes, but at round 2 it had"):
        run([finished])


@pytest.mark.parametrize("content", [b"", b"null\n", b"[1]\n", b"\xff\n", b"{}"])
def test_a_run_with_a_corrupt_summary_gets_a_new_one(tmp_path: Path, content: bytes) -> None:
    finished = job(tmp_path / "0")
    run([finished])
    (finished.folder / "summary.json").write_bytes(content)
    assert [event.reused for event in run([finished])] == [False]
    assert [event.reused for event in run([finished])] == [True]


@pytest.mark.skipif(os.name != "posix", reason="limits as POSIX has them")
def test_a_run_stopped_by_a_full_disk_resumes_when_there_is_space(tmp_path: Path) -> None:
    import resource

    stopped, limits = job(tmp_path / "0"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # enough for all files except the tensors
    try:
        with pytest.raises(RunDirectoryError, match="File too large"):
            run([stopped])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    summary = stopped.directory.summary()
    assert summary is not None
    assert summary["status"] == "interrupted"
    assert [event.reused for event in run([stopped])] == [False]
    assert len(stopped.directory.records()) == 2


def test_parallel_runs_equal_sequential_ones_and_an_error_ends_them(tmp_path: Path) -> None:
    together = [job(tmp_path / f"t{seed}", f"seed={seed}") for seed in (0, 1)]
    with pytest.raises(config.ConfigError, match="cannot share"):
        run([*together, job(tmp_path / "wrong", "partition.clients=5000")], workers=2)
    done = [one for one in together if one.directory.summary()]  # the invalid job starts after one of them has finished
    assert done
    for one in done:
        other = Job(one.config, tmp_path / "alone" / one.folder.name)
        run([other])
        first, second = one.directory.records(), other.directory.records()
        assert [record.loss for record in first] == [record.loss for record in second]
        assert len(first) == 2


def test_there_is_at_least_one_worker() -> None:
    assert default_workers() >= 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot bind processes to processors")
def test_workers_share_the_processors() -> None:
    everything, arrivals = os.sched_getaffinity(0), multiprocessing.get_context("spawn").Value("i", 0)
    handler = signal.getsignal(signal.SIGINT)
    shares = []
    try:
        for _ in everything:
            _start_worker(arrivals, len(everything))
            shares.append(os.sched_getaffinity(0))
            os.sched_setaffinity(0, everything)
        assert sorted(core for share in shares for core in share) == sorted(everything)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        _start_worker(arrivals, len(everything) + 1)
        assert os.sched_getaffinity(0) == everything
    finally:
        os.sched_setaffinity(0, everything)
        signal.signal(signal.SIGINT, handler)
