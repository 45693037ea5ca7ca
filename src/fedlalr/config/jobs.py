"""Several runs, a few in parallel, each in its own directory; finished runs are not repeated."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch

from fedlalr.common.interrupts import blocked
from fedlalr.common.printable import plain_warnings
from fedlalr.common.reading import open_file, whole_lines
from fedlalr.config.build import execute
from fedlalr.config.errors import ConfigError
from fedlalr.config.run_dir import RunDirectory, Summary
from fedlalr.config.schema import Config
from fedlalr.federation import RoundFailed
from fedlalr.federation.storage.fingerprint import differences, flat
from fedlalr.federation.storage.journal import METRICS_FILE
from fedlalr.training.machine import usable_cores


@dataclass(frozen=True)
class Job:
    """A run and its folder."""

    config: Config
    folder: Path

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.folder)

    def rounds_done(self) -> int:
        """Rounds recorded so far."""
        try:
            with open_file(self.folder / METRICS_FILE) as lines:
                return sum(1 for _ in whole_lines(lines))
        except (FileNotFoundError, NotADirectoryError):
            return 0


@dataclass(frozen=True)
class Event:
    """Progress of jobs: the running jobs, or a completed one."""

    done: int
    total: int
    running: Sequence[Job] = ()
    over: Job | None = None
    summary: Summary | None = None
    reused: bool = False


Step = tuple[int | None, Sequence[int], Exception | None]
"""The index of a completed job, or None for a periodic update; the running jobs; the error of the completed job."""


class ProcessDied(RuntimeError):
    """A worker process ended without an error message."""


def finished(job: Job) -> Summary | None:
    """The summary of a completed run with the same settings in the folder, including a run with a failed round."""
    summary = ended(job)
    return summary if summary is not None and same_problem(job) else None


def ended(job: Job) -> Summary | None:
    """The summary of any run in the folder, if the run is over and its records are complete."""
    try:
        summary, recorded = job.directory.summary(), len(job.directory.records())
    except (ValueError, TypeError, KeyError):  # corrupt: the run resumes from its checkpoint, or says why it cannot
        return None
    if summary is None or summary.get("status") not in ("finished", "failed"):
        return None
    return summary if summary.get("rounds") == recorded else None  # lost lines would shorten the curve


def same_problem(job: Job) -> bool:
    """Whether the run in a job's folder has its settings."""
    try:
        return job.directory.config().problem() == job.config.problem()
    except ConfigError:  # missing, or not readable by this version
        return False


def changes(job: Job, ignored: Collection[str] = ()) -> list[str]:
    """The differences between the run in a job's folder and the job; empty if there is none, or the same one."""
    if not job.directory.holds_run:
        return []
    try:
        before = job.directory.config().problem()
    except ConfigError:
        return ["the settings of the run cannot be read"]
    tables = (flat(before), flat(job.config.problem()))
    return differences(*({key: value for key, value in table.items() if key not in ignored} for table in tables))


def run_jobs(
    jobs: Sequence[Job], workers: int, on_event: Callable[[Event], None], *, keep_going: bool = False
) -> list[Summary]:
    """Run all unfinished jobs and return the summary of every job, in order. A failed round counts as an outcome.

    With `keep_going`, any other error, including a dead process, fails only its own run, which is tried again the next
    time.
    """
    summaries: dict[int, Summary] = {}
    todo: list[int] = []
    for i, job in enumerate(jobs):
        summary = finished(job)
        if summary is None:
            todo.append(i)
        else:
            summaries[i] = summary
            on_event(Event(len(summaries), len(jobs), over=job, summary=summary, reused=True))
    several = min(workers, len(todo))
    with closing(_in_turn(jobs, todo) if several < 2 else _at_once(jobs, todo, several)) as started:
        for over, running, error in started:
            if error is not None and not keep_going:
                raise _died(jobs[over]) if isinstance(error, BrokenProcessPool) and over is not None else error
            if over is not None:
                summary = jobs[over].directory.summary() if error is None else _broken(jobs[over], error)
                assert summary is not None, f"{jobs[over].folder} has no summary after its run"
                summaries[over] = summary
            ending, found = (None, None) if over is None else (jobs[over], summaries[over])
            on_event(Event(len(summaries), len(jobs), [jobs[j] for j in running], ending, found))
    return [summaries[i] for i in range(len(jobs))]


def default_workers() -> int:
    """One run per processor; one at a time on a GPU, which a single run should fill."""
    return 1 if torch.cuda.is_available() else usable_cores()


def _in_turn(jobs: Sequence[Job], todo: Sequence[int]) -> Generator[Step]:
    for i in todo:
        yield None, [i], None
        error = None
        try:
            _work(jobs[i])
        except Exception as raised:  # the caller decides
            error = raised
        yield i, [], error


def _at_once(jobs: Sequence[Job], todo: Sequence[int], workers: int) -> Generator[Step]:
    waiting = list(todo)
    while waiting:  # with new processes after one has died
        with _pool(workers) as pool:
            yield from _drain(pool, jobs, waiting, workers)


def _drain(pool: ProcessPoolExecutor, jobs: Sequence[Job], waiting: list[int], workers: int) -> Generator[Step]:
    """Run the waiting jobs until none is left or the pool is broken."""
    running: dict[Future[None], int] = {}
    broken = False
    while running or (waiting and not broken):
        while waiting and len(running) < workers and not broken:
            try:
                with blocked():  # a submission may start a process
                    future = pool.submit(_work, jobs[waiting[0]])
            except BrokenProcessPool:
                broken = True
            else:
                running[future] = waiting.pop(0)
        over, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
        if not over:
            yield None, list(running.values()), None
        for future in over:
            i, error = running.pop(future), future.exception()
            broken |= isinstance(error, BrokenProcessPool)
            assert error is None or isinstance(error, Exception)  # workers ignore interrupts
            yield i, list(running.values()), error


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """New processes that share the processors, killed at once if the comparison is interrupted."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // workers))  # read when a worker imports torch
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(context.Value("i", 0), workers)
    )
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _start_worker(arrivals: Synchronized[int], workers: int) -> None:
    """Prepare a worker: its share of the processors, so that no engine uses all; only the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with arrivals.get_lock():
        mine = arrivals.value % workers
        arrivals.value += 1
    if hasattr(os, "sched_setaffinity") and usable_cores() >= workers:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[mine::workers])


def _end_with(parent: BaseProcess) -> None:
    """End this process with its parent: a killed parent stops no workers, and their runs would keep their folders."""
    parent.join()
    os._exit(1)  # safe at any instant: runs can be resumed


def _work(job: Job) -> None:
    """Resume the run in the job's folder if it has the same settings, or else start a new one."""
    resume = same_problem(job) and job.directory.holds_run
    with plain_warnings(job.folder), suppress(RoundFailed):  # the summary says why a round failed
        execute(job.config, job.folder, resume=resume, overwrite=not resume)


def _died(job: Job) -> ProcessDied:
    return ProcessDied(
        f"the process of {job.folder} or a parallel one died: it was killed, out of memory, or crashed in a library. "
        "Finished runs are kept; repeat the command to resume"
    )


def _broken(job: Job, error: Exception) -> Summary:
    """The summary of a run that ended with an unexpected error. It is not saved: the run is resumed the next time."""
    died = isinstance(error, BrokenProcessPool)
    failure = "its process or a parallel one died" if died else f"{type(error).__name__}: {error}"
    return {"accuracy": None, "seconds": 0.0, **(job.directory.summary() or {}), "status": "failed", "failure": failure}
