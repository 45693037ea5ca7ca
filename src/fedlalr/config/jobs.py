"""Several runs, a few at a time, each in its own directory; what is already finished is not run again."""

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
from typing import Any

from fedlalr.common.interrupts import blocked
from fedlalr.common.reading import open_file, whole_lines
from fedlalr.config.build import execute
from fedlalr.config.errors import ConfigError
from fedlalr.config.loading import check
from fedlalr.config.run_dir import RunDirectory, Summary
from fedlalr.config.schema import Config
from fedlalr.federation import RoundFailed
from fedlalr.federation.storage.fingerprint import differences, flat
from fedlalr.federation.storage.journal import METRICS_FILE
from fedlalr.training.machine import usable_cores


@dataclass(frozen=True)
class Job:
    """A run to be had."""

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
    """Something to show while jobs run: the jobs under way, or one that is over."""

    done: int
    total: int
    running: Sequence[Job] = ()
    over: Job | None = None
    summary: Summary | None = None
    reused: bool = False


Step = tuple[int | None, Sequence[int], Exception | None]
"""The number of the job that is over, or None every moment; the jobs under way; the error that ended the one over."""


class ProcessDied(RuntimeError):
    """A process that runs were trained in ended without a word."""


def finished(job: Job) -> Summary | None:
    """The summary of a run of the same settings that the folder already holds, be it one that failed in a round."""
    summary = ended(job)
    return summary if summary is not None and same_problem(job.config.model_dump(), job.folder) else None


def ended(job: Job) -> Summary | None:
    """The summary of whatever run the folder holds, if it is over and its records are all there."""
    try:
        summary, recorded = job.directory.summary(), len(job.directory.records())
    except (ValueError, TypeError, KeyError):  # damaged: the run goes on from its checkpoint, or says why it cannot
        return None
    if not isinstance(summary, dict) or summary.get("status") not in ("finished", "failed"):
        return None
    return summary if summary.get("rounds") == recorded else None  # a file that lost lines would be a shorter curve


def same_problem(config: dict[str, Any], folder: Path) -> bool:
    """Whether the run in a folder has these settings."""
    try:
        return RunDirectory(folder).config().problem() == check(config).problem()
    except ConfigError:  # there is none, or one that this version cannot read
        return False


def changes(job: Job, ignored: Collection[str] = ()) -> list[str]:
    """How the run that lies in a job's folder differs from the job; nothing where there is none, or the same one."""
    if not job.directory.holds_run:
        return []
    try:
        before = job.directory.config().problem()
    except ConfigError:
        return ["is a run whose settings cannot be read"]
    tables = (flat(before), flat(check(job.config.model_dump()).problem()))
    return differences(*({key: value for key, value in table.items() if key not in ignored} for table in tables))


def run_jobs(
    jobs: Sequence[Job], workers: int, on_event: Callable[[Event], None], *, keep_going: bool = False
) -> list[Summary]:
    """Run what is not finished yet and return every job's summary, in order. A failed round is an outcome too.

    With `keep_going` any other error, also a process that dies, is the failure of its run alone, which is tried again
    the next time.
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
                summaries[over] = _summary(jobs[over]) if error is None else _broken(jobs[over], error)
            on_event(
                Event(
                    done=len(summaries),
                    total=len(jobs),
                    running=[jobs[j] for j in running],
                    over=None if over is None else jobs[over],
                    summary=None if over is None else summaries[over],
                )
            )
    return [summaries[i] for i in range(len(jobs))]


def default_workers() -> int:
    """One run for each processor; one at a time on a GPU, which a single run is meant to fill."""
    import torch

    if torch.cuda.is_available():
        return 1
    return usable_cores()


def _in_turn(jobs: Sequence[Job], todo: Sequence[int]) -> Generator[Step]:
    for i in todo:
        yield None, [i], None
        error = None
        try:
            _work(jobs[i].config.model_dump(), str(jobs[i].folder))
        except Exception as raised:  # for the caller to judge
            error = raised
        yield i, [], error


def _at_once(jobs: Sequence[Job], todo: Sequence[int], workers: int) -> Generator[Step]:
    waiting = list(todo)
    while waiting:  # with new processes, where one has died
        with _pool(workers) as pool:
            yield from _drain(pool, jobs, waiting, workers)


def _drain(pool: ProcessPoolExecutor, jobs: Sequence[Job], waiting: list[int], workers: int) -> Generator[Step]:
    """Have the waiting jobs done, until none is left or the pool is broken."""
    running: dict[Future[None], int] = {}
    broken = False
    while running or (waiting and not broken):
        while waiting and len(running) < workers and not broken:
            job = jobs[waiting[0]]
            try:
                with blocked():  # a submission may start a process
                    future = pool.submit(_work, job.config.model_dump(), str(job.folder))
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
    """Fresh processes that share the processors out among them, ended at once when the comparison is interrupted."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(max(1, usable_cores() // workers))  # read when a worker imports torch
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_settle, initargs=(context.Value("i", 0), workers)
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


def _settle(arrivals: Synchronized[int], workers: int) -> None:
    """Prepare a worker: its own share of the processors, so that no engine takes them all; Ctrl-C is for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with arrivals.get_lock():
        mine = arrivals.value % workers
        arrivals.value += 1
    if hasattr(os, "sched_setaffinity") and usable_cores() >= workers:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[mine::workers])


def _end_with(parent: BaseProcess) -> None:
    """End this process when its parent is gone: killed, it ends no worker, and their runs would keep their folders."""
    parent.join()
    os._exit(1)  # at any instant, as runs can take


def _work(config: dict[str, Any], folder: str) -> None:
    """Go on with the run in the folder if it is the same one, else start it anew."""
    resume = same_problem(config, Path(folder)) and RunDirectory(folder).holds_run
    with suppress(RoundFailed):  # the summary says why
        execute(check(config), folder, resume=resume, overwrite=not resume)


def _died(job: Job) -> ProcessDied:
    return ProcessDied(
        f"the process of {job.folder} died, or one beside it: it was killed, out of memory or crashed in a library. "
        "What is finished is kept, so the same command goes on from there"
    )


def _broken(job: Job, error: Exception) -> Summary:
    """What is known of a run that an unexpected error ended. It is not written: the next time the run goes on."""
    died = isinstance(error, BrokenProcessPool)
    failure = "its process died, or one beside it" if died else f"{type(error).__name__}: {error}"
    return {"accuracy": None, "seconds": 0.0, **(job.directory.summary() or {}), "status": "failed", "failure": failure}


def _summary(job: Job) -> Summary:
    summary = job.directory.summary()
    assert summary is not None, f"{job.folder} has no summary after its run"
    return summary
