"""The files of a run: `metrics.jsonl` and the last two checkpoints. Nothing else writes them.

    run_dir/
        metrics.jsonl            one line per round
        checkpoint/              the last two, see `checkpoint.py`
        .lock                    held while a process works here

The order of writing makes a crash at any instant harmless: the lines of earlier rounds are flushed, then the checkpoint
appears as a whole and includes its round's record, then the line of that round follows. Resuming truncates the file to
the checkpoint's round and appends its record.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from io import BytesIO, FileIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout

from fedlalr.algorithms.slots import Slots
from fedlalr.common.reading import open_file, whole_lines
from fedlalr.federation.record import Record
from fedlalr.federation.round import ServerState
from fedlalr.federation.storage.checkpoint import (
    Checkpoint,
    CheckpointError,
    discard,
    kept_files_of,
    load_checkpoint,
    read_description,
    save_checkpoint,
)
from fedlalr.federation.storage.fingerprint import Facts, differences
from fedlalr.federation.storage.tensor_files import KeptFiles

METRICS_FILE, CHECKPOINTS, LOCK_FILE = "metrics.jsonl", "checkpoint", ".lock"
CHECKPOINTS_KEPT = 2
_CHECKPOINT = re.compile(r"round-(\d{6,})")


class RunDirectoryError(RuntimeError):
    """The run directory cannot be used as requested. The last good checkpoint in it is unchanged."""


class _Progress(NamedTuple):
    """What has been written. Replaced as one value, so that an interrupt never finds it half changed."""

    offset: int = 0
    """Bytes of complete lines in `metrics.jsonl`."""
    unsaved: ServerState | None = None
    """The last state, if no checkpoint has it."""
    unwritten: Record | None = None
    """The last record, if its line is not written."""


class Journal:
    """Records the rounds of a run in its directory, and finds where an interrupted run resumes.

    If the directory is None, it keeps the records in memory and writes nothing.
    """

    def __init__(self, directory: str | Path | None, *, resume: bool = False, every: int = 1) -> None:
        self.path = Path(directory) if directory is not None else None
        self.resume, self.every = resume, every
        self.records: list[Record] = []
        self.choices: dict[str, Any] = {}
        """What the library chose when the run started; set by `restore` or, in a new run, by the caller."""
        self._facts: Facts = {}
        self._file: FileIO | None = None
        self._stack = ExitStack()
        """Closes the file, then unlocks the directory."""
        self._kept = KeptFiles(self.path / CHECKPOINTS) if self.path is not None else None
        self._progress = _Progress()
        self._passed_over: set[Path] = set()
        """Damaged checkpoints that were skipped; removed once there is a good one in their place."""

    def __enter__(self) -> Journal:
        """Lock the directory. A directory that contains a run is rejected unless that run is resumed."""
        if self.path is None:
            return self
        if os.path.isfile(self.path):
            raise RunDirectoryError(f"{self.path} is a file, but run_dir must be a directory; choose another one")
        with ExitStack() as stack, explained(f"the run directory {self.path} cannot be written"):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(self.path / LOCK_FILE, timeout=0))
            except Timeout:
                raise RunDirectoryError(
                    f"another process is working in {self.path}; wait for it to end, or choose another directory"
                ) from None
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            if not self.resume and (self._places() or self._has_lines()):
                raise RunDirectoryError(
                    f"{self.path} already contains a run; pass resume=True to resume it, or choose another directory"
                )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, _: object, error: object, trace: object) -> None:
        """Save what is not saved yet, even after Ctrl-C or a failed round, and unlock the directory."""
        with self._stack:
            if not isinstance(error, RunDirectoryError):
                self._save()
                self._append()

    def restore(self, fresh: ServerState, facts: Facts, kept: Slots, engine: str) -> ServerState:
        """The state to start from: that of the newest good checkpoint or, in a new run, the fresh one.

        `kept` is what a new client keeps, if the checkpoints contain it.
        """
        self._facts = facts
        if self.path is None:
            return fresh
        found = self._newest(fresh, facts, kept) if self.resume else None
        if found is None and self._has_lines():
            raise RunDirectoryError(
                f"{self.path / METRICS_FILE} has records but there is no checkpoint to resume from; "
                f"choose another directory"
            )
        if found is not None:
            began = found.choices.get("engine")
            if engine.partition(":")[0] not in ("auto", began):
                raise RunDirectoryError(
                    f"the run in {self.path} was started with engine {began!r} and cannot be resumed with {engine!r}; "
                    f"use {began!r} or 'auto'"
                )
            self.choices = dict(found.choices)
            self.records = self._cut(found, self.path / METRICS_FILE)
        with explained(f"the run directory {self.path} cannot be written"):
            file = FileIO(self.path / METRICS_FILE, "ab", opener=_without_waiting)
            self._file = self._stack.enter_context(file)
            self._append()
        for pattern in (".writing-*", ".stale-*"):  # what a killed process was writing or removing
            for left in (self.path / CHECKPOINTS).glob(pattern):
                discard(left)
        return fresh if found is None else found.state

    def start(self, state: ServerState) -> None:
        """Save the first state of a new run, before any round."""
        if self.path is not None and not self._places():
            self._progress = self._progress._replace(unsaved=state)
            self._save()

    def add(self, state: ServerState, record: Record, *, last: bool = False) -> Record:
        """Write a finished round: a checkpoint if one is due, then its line. Returns the record with that time."""
        if self.path is not None:
            began = time.perf_counter()
            self._progress = self._progress._replace(unsaved=state, unwritten=record)
            if self.saves(state.round, last):
                self._save()
            took = time.perf_counter() - began
            record = replace(record, seconds=record.seconds + took, timing={**record.timing, "checkpoint": took})
            self._progress = self._progress._replace(unwritten=record)
            self._append()
        self.records.append(record)
        return record

    def saves(self, round: int, last: bool) -> bool:
        """Whether a round ends with a checkpoint; without a directory, every round counts as saved."""
        return self.path is None or last or round % self.every == 0

    def _save(self) -> None:
        """Write a checkpoint of the last state, unless it is saved."""
        offset, state, record = self._progress
        if state is None or self.path is None:
            return
        with explained(self._failed(state.round)):
            if self._file is not None:
                os.fsync(self._file.fileno())
            folder = self.path / CHECKPOINTS
            checkpoint = Checkpoint(state, record, offset, self._facts, self.choices, versions())
            self._passed_over.discard(save_checkpoint(folder, checkpoint, self._kept))
        self._progress = self._progress._replace(unsaved=None)
        self._remove_old()

    def _remove_old(self) -> None:
        """Remove all but the last checkpoints and the files they refer to."""
        for damaged in self._passed_over:
            discard(damaged)
        self._passed_over.clear()
        places = self._places()
        for old in places[:-CHECKPOINTS_KEPT]:
            discard(old)
        if self._kept is not None:
            self._kept.prune(file for place in places[-CHECKPOINTS_KEPT:] for file in kept_files_of(place))

    def _append(self) -> None:
        """Write the line of the last record, unless it is written. A partial line from an interrupt is overwritten."""
        offset, _, record = self._progress
        if record is None or self._file is None:
            return
        line = record.to_json().encode() + b"\n"
        with explained(self._failed(record.round)):
            self._file.truncate(offset)
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
        self._progress = self._progress._replace(offset=offset + len(line), unwritten=None)

    def _failed(self, round: int) -> str:
        saved = [place.name for place in self._places()]
        return (
            f"round {round} cannot be saved in {self.path} (the last good checkpoint is "
            f"{saved[-1] if saved else 'none'}; fix the problem, then resume)"
        )

    def _newest(self, like: ServerState, facts: Facts, kept: Slots) -> Checkpoint | None:
        """The newest checkpoint that can be read. If it is damaged, warns and uses an older one."""
        assert self.path is not None
        errors: list[str] = []
        for place in reversed(self._places()):
            try:
                _check_same_run(read_description(place), facts, self.path)
                found = load_checkpoint(place, like, kept, self._kept)
            except CheckpointError as error:
                errors.append(str(error))
                self._passed_over.add(place)
                continue
            for message in errors:
                resuming = f"{message}; resuming from round {found.state.round} instead"
                warnings.warn(resuming, RuntimeWarning, stacklevel=4)
            return found
        if errors:
            raise RunDirectoryError(f"no checkpoint in {self.path} can be used: {'; '.join(errors)}")
        return None

    def _cut(self, found: Checkpoint, file: Path) -> list[Record]:
        """Truncate `metrics.jsonl` to the checkpoint's round, and return the records of the rounds up to it."""
        before = found.state.round - (found.record is not None)
        try:
            with explained(f"{file} cannot be read"), open_file(file) if file.exists() else BytesIO() as content:
                size, lines = content.seek(0, os.SEEK_END), whole_lines(content)
                if size < found.offset:
                    raise RunDirectoryError(
                        f"{file} has {size} bytes, but at round {found.state.round} it had {found.offset}; "
                        f"it was changed after it was written. Restore it, or start a new run in another directory"
                    )
                content.seek(0)
                records = [Record.from_json(line.decode()) for line in islice(lines, before)]
                end = content.tell()
                after = next(lines, None)
        except (ValueError, TypeError, KeyError) as error:
            raise RunDirectoryError(f"{file} is damaged: {error}") from error
        ascending = all(record.round == round for round, record in enumerate(records, 1))
        if end != found.offset or len(records) != before or not ascending:
            raise RunDirectoryError(f"{file} is damaged: up to the checkpoint it should hold rounds 1 to {before}")
        self._progress = _Progress(offset=found.offset, unwritten=found.record)
        last = found.record
        if last is not None and after is not None:
            with suppress(ValueError, TypeError, KeyError):  # the line of an interrupted write
                written = Record.from_json(after.decode())
                if written.round == last.round:
                    last, self._progress = written, _Progress(offset=found.offset + len(after) + 1)
        records += [] if last is None else [last]
        with explained(f"the run directory {self.path} cannot be written"):
            if self._progress.offset < size:
                os.truncate(file, self._progress.offset)
        return records

    def _places(self) -> list[Path]:
        """All checkpoints, oldest first. Copies with other names are ignored."""
        assert self.path is not None
        found = ((_CHECKPOINT.fullmatch(place.name), place) for place in (self.path / CHECKPOINTS).glob("round-*"))
        return [place for _, place in sorted((int(name[1]), place) for name, place in found if name)]

    def _has_lines(self) -> bool:
        assert self.path is not None
        file = self.path / METRICS_FILE
        return file.is_file() and file.stat().st_size > 0


def clear_run(path: Path, also: Iterable[str] = ()) -> None:
    """Remove the metrics, checkpoints and `also` other files of a run, unless a process is working on it."""
    if not path.is_dir():
        return
    with Journal(path, resume=True), explained(f"the run directory {path} cannot be cleared"):
        (path / METRICS_FILE).unlink(missing_ok=True)
        shutil.rmtree(path / CHECKPOINTS)
        for name in also:  # last, so that a half-cleared run can still be identified
            (path / name).unlink(missing_ok=True)


def versions() -> dict[str, str]:
    """The versions that bits may depend on, and the processor instructions that torch uses."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "numpy": np.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }


def _check_same_run(description: Mapping[str, Any], facts: Facts, path: Path) -> None:
    """Reject a different run; warn about different library versions or processor instructions."""
    different = differences(description["facts"], facts)
    if different:
        extended = description["facts"].get("rounds") != facts.get("rounds")  # a fact only if others depend on it
        why = ", on which its schedule or its privacy depends" if extended else ""
        raise RunDirectoryError(
            f"the run in {path} cannot be resumed with different settings: {'; '.join(different)}{why}. "
            f"Use the settings it was started with, or another directory for a new run"
        )
    changed = differences(description["versions"], versions())
    if changed:
        warnings.warn(
            f"the environment has changed since the run was started: {'; '.join(changed)}; the last bits may differ",
            RuntimeWarning,
            stacklevel=5,
        )


def _without_waiting(path: str, flags: int) -> int:
    """Open a file for writing; for a pipe without a reader, raise an error instead of waiting forever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


@contextmanager
def explained(what: str, advice: str = "") -> Iterator[None]:
    """Turn an `OSError` into a `RunDirectoryError` that says what failed and what to do."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{what}: {error.strerror or error}{advice}") from error
