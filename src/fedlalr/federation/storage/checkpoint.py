"""One checkpoint on disk: a folder that exists as a whole or not at all.

    round-000012/
        state.safetensors    slots and buffers
        checkpoint.json      round, record, the facts of the run, automatic choices, and the hashes of all files
    kept-000012.safetensors  what clients keep, if it changed; see `tensor_files.py`

Both files are written to a temporary folder and flushed to disk; then the folder is renamed. Reading executes nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.common.files import sync_folder, write_bytes
from fedlalr.common.reading import read_file
from fedlalr.federation.record import Record
from fedlalr.federation.round import ServerState
from fedlalr.federation.storage.fingerprint import Facts
from fedlalr.federation.storage.tensor_files import KeptFiles, Seal, read_tensors, take, write_tensors

FORMAT = 3
WRITTEN_BY = {"1": "fedlalr 0.1", "2": "a development version of fedlalr 0.2"}
TENSORS, DESCRIPTION = "state.safetensors", "checkpoint.json"
LARGEST_DESCRIPTION = 1 << 26
"""A description with more bytes than this is not read."""
MOST_THREADS = 4096
"""No machine uses more; torch would try to start any number."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used. The message names it and says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after some round, with everything needed to resume it."""

    state: ServerState
    record: Record | None
    """The record of the state's round; None before the first."""
    offset: int
    """Bytes in `metrics.jsonl` before that record's line."""
    facts: Facts
    choices: Mapping[str, Any] = field(default_factory=dict)
    """What the library chose at the start of the run, such as the engine and the number of threads."""
    versions: Mapping[str, str] = field(default_factory=dict)


def save_checkpoint(folder: Path, checkpoint: Checkpoint, kept: KeptFiles | None = None) -> Path:
    """Write a checkpoint, named after its round, to the folder of checkpoints. On `OSError` the others are intact."""
    place = folder / f"round-{checkpoint.state.round:06d}"
    aside, stale = folder / f".writing-{place.name}", folder / f".stale-{place.name}"
    for left in (aside, stale):
        discard(left)
    rows = (kept or KeptFiles(folder)).save(checkpoint.state.round, checkpoint.state.kept)
    try:
        aside.mkdir()
        seal = write_tensors(aside / TENSORS, _tensors(checkpoint.state))
        write_bytes(aside / DESCRIPTION, _describe(checkpoint, seal, rows))
        sync_folder(aside)
        if place.exists():  # left over from a run that was resumed from an older checkpoint
            place.rename(stale)  # renamed first: while it is removed, its name would stand for half a checkpoint
        aside.rename(place)
    except BaseException:
        discard(aside)
        raise
    sync_folder(folder)
    discard(stale)
    return place


def discard(place: Path) -> None:
    """Remove a checkpoint or what is left of one, even if it is a file. Failing to remove it does no harm."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place, ignore_errors=True)
    else:
        with suppress(OSError):
            place.unlink(missing_ok=True)


def load_checkpoint(place: Path, like: ServerState, row: Slots, kept: KeptFiles | None = None) -> Checkpoint:
    """Read a checkpoint of a run whose state has the form of `like` and whose clients each keep the like of `row`.

    Raises `CheckpointError` if it cannot be used.
    """
    try:
        description = read_description(place)
        expected = sum(tensor.nbytes for tensor in _tensors(like).values())
        tensors = read_tensors(place / TENSORS, Seal(description["bytes"], description["sha256"]), expected)
        slots = Slots(**{name: take(tensors, f"slot/{name}", tensor) for name, tensor in like.slots.items()})
        buffers = {name: take(tensors, f"buffer/{name}", tensor) for name, tensor in like.buffers.items()}
        if tensors:
            raise ValueError(f"it holds {', '.join(sorted(tensors))}, which this run does not have")
        rows = (kept or KeptFiles(place.parent)).load(description["kept"], row)
        record = None if description["record"] is None else Record.from_json(json.dumps(description["record"]))
        if record is not None and record.round != description["round"]:
            raise ValueError(f"its round is {description['round']}, but the round of its record is {record.round}")
        others = {name: description[name] for name in ("offset", "facts", "choices", "versions")}
        return Checkpoint(ServerState(description["round"], slots, buffers, rows), record, **others)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {place} cannot be read: {type(error).__name__}: {error}") from error


def read_description(place: Path) -> dict[str, Any]:
    """The verified JSON of a checkpoint, without its tensors."""
    try:
        whole = json.loads(read_file(place / DESCRIPTION, LARGEST_DESCRIPTION))
        content, stated = whole["content"], whole["sha256"]
        version = content["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {place} cannot be read: {type(error).__name__}: {error}") from error
    if sealed(content)["sha256"] != stated:
        raise CheckpointError(f"the checkpoint {place} is damaged: {DESCRIPTION} does not match its own hash")
    if version != FORMAT:
        writer = WRITTEN_BY.get(str(version), "another version")
        raise CheckpointError(
            f"the checkpoint {place} has format {version}, written by {writer}, and this version of fedlalr reads "
            f"format {FORMAT}; resume the run with the version that started it, or start a new run in another directory"
        )
    for name, fits in _FITS.items():
        if name not in content or not fits(content[name]):
            raise CheckpointError(f"the checkpoint {place} cannot be used: its {name} is invalid")
    return dict(content)


def _whole(value: object, least: int = 0, most: int = (1 << 63) - 1) -> bool:
    return type(value) is int and least <= value <= most


def _is_choices(value: object) -> bool:
    """Whether a value is what a run records of its engine and threads; empty if the run has not started."""
    if not isinstance(value, dict) or not value:
        return value == {}
    chunk, engine = value.get("chunk"), value.get("engine", "")
    return _whole(value.get("threads"), 1, MOST_THREADS) and (chunk is None or _whole(chunk, 1)) and type(engine) is str


_FITS: dict[str, Callable[[Any], bool]] = {
    "round": _whole,
    "bytes": _whole,
    "sha256": lambda value: isinstance(value, str),
    "kept": lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
    "record": lambda value: value is None or isinstance(value, dict),
    "offset": _whole,
    "facts": lambda value: isinstance(value, dict),
    "choices": _is_choices,
    "versions": lambda value: isinstance(value, dict),
}
"""Checks of each part of a description: a manipulated file may have a correct hash."""


def kept_files_of(place: Path) -> list[str]:
    """The files with clients' kept slots that a checkpoint refers to; none if it cannot be read."""
    try:
        return [str(entry["file"]) for entry in read_description(place)["kept"]]
    except (CheckpointError, KeyError):
        return []


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A description with its hash."""
    hashed = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return {"content": content, "sha256": hashlib.sha256(hashed).hexdigest()}


def _tensors(state: ServerState) -> dict[str, Tensor]:
    named = {f"slot/{name}": tensor for name, tensor in state.slots.items()}
    return named | {f"buffer/{name}": tensor for name, tensor in state.buffers.items()}


def _describe(checkpoint: Checkpoint, seal: Seal, kept: list[dict[str, Any]]) -> bytes:
    content = {
        "format": FORMAT,
        "round": checkpoint.state.round,
        **seal._asdict(),
        "kept": kept,
        "record": checkpoint.record.as_dict() if checkpoint.record is not None else None,
        "offset": checkpoint.offset,
        "facts": checkpoint.facts,
        "choices": dict(checkpoint.choices),
        "versions": dict(checkpoint.versions),
    }
    return json.dumps(sealed(content), indent=1, ensure_ascii=False).encode()
