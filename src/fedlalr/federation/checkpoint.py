"""One checkpoint on disk: a folder that is there as a whole or not at all.

    round-000012/
        state.safetensors    slots, buffers, what the clients keep
        checkpoint.json      round, record, the facts of the run, what was chosen, and the hash of the tensors

Both files are written in a folder aside and flushed to the disk; then the folder is renamed. Reading executes nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.federation.fingerprint import Facts
from fedlalr.federation.metrics import Record
from fedlalr.federation.server import ServerState

FORMAT = 1
TENSORS, DESCRIPTION = "state.safetensors", "checkpoint.json"
LARGEST_DESCRIPTION = 1 << 26
"""A description of more bytes than this is not read."""

_CLIENTS = "kept_clients"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used. The message names it and says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after some round, with all that is needed to go on."""

    state: ServerState
    record: Record | None
    """Of the state's round; None before the first."""
    offset: int
    """Bytes of `metrics.jsonl` before that record's line."""
    facts: Facts
    choices: Mapping[str, Any] = field(default_factory=dict)
    """What was left to the library at the start of the run, such as the engine and the number of threads."""
    versions: Mapping[str, str] = field(default_factory=dict)


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into the folder of checkpoints, named after its round. On `OSError` the others stand."""
    place = folder / f"round-{checkpoint.state.round:06d}"
    aside = folder / f".writing-{place.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        content = save(_tensors(checkpoint.state))
        _write(aside / TENSORS, content)
        _write(aside / DESCRIPTION, _describe(checkpoint, content))
        sync_folder(aside)
        if place.exists():  # left over from a run that went on from an older checkpoint
            shutil.rmtree(place)
        aside.rename(place)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    sync_folder(folder)
    return place


def load_checkpoint(place: Path, like: ServerState, kept: tuple[str, ...]) -> Checkpoint:
    """Read a checkpoint of a run whose state looks like `like`. Whatever is wrong with it is a `CheckpointError`."""
    try:
        description = read_description(place)
        tensors = _read_tensors(place / TENSORS, description)
        state = _state(description["round"], tensors, like, kept)
        record = description["record"]
        return Checkpoint(
            state=state,
            record=None if record is None else Record.from_json(json.dumps(record)),
            offset=description["offset"],
            facts=description["facts"],
            choices=description["choices"],
            versions=description["versions"],
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {place} cannot be read: {type(error).__name__}: {error}") from error


def read_description(place: Path) -> dict[str, Any]:
    """The checked JSON of a checkpoint, without its tensors."""
    path = place / DESCRIPTION
    try:
        if path.stat().st_size > LARGEST_DESCRIPTION:
            raise CheckpointError(f"the checkpoint {place} is refused: {DESCRIPTION} is larger than any real one")
        whole = json.loads(path.read_text(encoding="utf-8"))
        content, stated = whole["content"], whole["sha256"]
        version = content["format"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {place} cannot be read: {type(error).__name__}: {error}") from error
    if hashlib.sha256(canonical(content)).hexdigest() != stated:
        raise CheckpointError(f"the checkpoint {place} is damaged: {DESCRIPTION} does not match its own hash")
    if version != FORMAT:
        raise CheckpointError(
            f"the checkpoint {place} has format {version}, and this version of fedlalr reads format {FORMAT}"
        )
    result: dict[str, Any] = content
    return result


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the platform can open folders."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _tensors(state: ServerState) -> dict[str, Tensor]:
    named = {f"slot/{name}": tensor for name, tensor in state.slots.items()}
    named |= {f"buffer/{name}": tensor for name, tensor in state.buffers.items()}
    clients = sorted(state.kept)
    if clients:
        named[_CLIENTS] = torch.tensor(clients)
        for name in state.kept[clients[0]]:
            named[f"kept/{name}"] = torch.stack([state.kept[client][name] for client in clients])
    # Slots may share memory with one another, which the format does not allow.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named.items()}


def _describe(checkpoint: Checkpoint, tensors: bytes) -> bytes:
    content = {
        "format": FORMAT,
        "round": checkpoint.state.round,
        "bytes": len(tensors),
        "sha256": hashlib.sha256(tensors).hexdigest(),
        "record": checkpoint.record.as_dict() if checkpoint.record is not None else None,
        "offset": checkpoint.offset,
        "facts": checkpoint.facts,
        "choices": dict(checkpoint.choices),
        "versions": dict(checkpoint.versions),
    }
    whole = {"content": content, "sha256": hashlib.sha256(canonical(content)).hexdigest()}
    return json.dumps(whole, indent=1, ensure_ascii=False).encode()


def canonical(content: object) -> bytes:
    """The bytes of a description that its hash is taken of."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _read_tensors(path: Path, description: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors, after their number of bytes and their hash were found right."""
    size = path.stat().st_size
    if size != description["bytes"]:
        raise CheckpointError(f"{path} is damaged: it has {size:,} bytes, and {description['bytes']:,} were written")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != description["sha256"]:
        raise CheckpointError(f"{path} is damaged: its content does not match the hash taken when it was written")
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping


def _state(round: int, tensors: dict[str, Tensor], like: ServerState, kept: tuple[str, ...]) -> ServerState:
    """The server's state from named tensors, each of the shape, dtype and device that the run's own has."""
    slots = Slots(**{name: _take(tensors, f"slot/{name}", tensor) for name, tensor in like.slots.items()})
    buffers = {name: _take(tensors, f"buffer/{name}", tensor) for name, tensor in like.buffers.items()}
    clients = tensors.pop(_CLIENTS, torch.empty(0, dtype=torch.int64)).tolist()
    rows = like.slots.x.expand(len(clients), -1)
    stacks = {name: _take(tensors, f"kept/{name}", rows) for name in kept if clients}
    if tensors:
        raise ValueError(f"it holds {', '.join(sorted(tensors))}, which this run does not have")
    each = {
        client: Slots(**{name: stack[row].clone() for name, stack in stacks.items()})
        for row, client in enumerate(clients)
    }
    return ServerState(round=round, slots=slots, buffers=buffers, kept=each)


def _take(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in tensors:
        raise ValueError(f"it has no {name}")
    found = tensors.pop(name)
    if found.shape != like.shape or found.dtype != like.dtype:
        raise ValueError(
            f"its {name} is {tuple(found.shape)} {found.dtype}, and this run's is {tuple(like.shape)} {like.dtype}"
        )
    return found.to(like.device)
