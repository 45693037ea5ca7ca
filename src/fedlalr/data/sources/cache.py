"""The cache: one file of plain arrays per data set, fast to load, with its own checksum."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedlalr.common.files import sync_folder, written_aside
from fedlalr.data.fetch import DataCorrupt
from fedlalr.data.sources.rawdata import Arrays

_FORMAT = "fedlalr-data-1"
LARGEST_CACHED = 1 << 30
"""Bytes; that is five times the largest data set."""


def path(folder: Path, name: str) -> Path:
    """Where a data set is cached."""
    return folder / f"{name}.safetensors"


def save(file: Path, name: str, arrays: Arrays, origin: str) -> None:
    """Write verified arrays and their origin, completely or not at all."""
    contiguous = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    header = {"format": _FORMAT, "name": name, "origin": origin, "sha256": _digest(contiguous)}
    try:
        with written_aside(file) as aside:
            save_file(contiguous, aside, metadata=header)
        sync_folder(file.parent)
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written ({error})") from error


def load(file: Path, name: str) -> tuple[Arrays, str]:
    """The arrays and their origin. A file that was changed or truncated since it was written is rejected."""
    if file.stat().st_size > LARGEST_CACHED:
        raise DataCorrupt(f"the cached file {file} is larger than any data set; {_remedy(name)}")
    try:
        with safe_open(file, framework="numpy") as stored:
            header = stored.metadata() or {}
            arrays = {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, ValueError) as error:
        raise DataCorrupt(f"the cached file {file} cannot be read ({error}); {_remedy(name)}") from error
    if header.get("format") != _FORMAT or header.get("name") != name:
        raise DataCorrupt(f"the cached file {file} does not contain {name}; {_remedy(name)}")
    if header.get("sha256") != _digest(arrays):
        raise DataCorrupt(f"the cached file {file} was changed after it was written (wrong checksum); {_remedy(name)}")
    return arrays, header.get("origin", "unknown")


def _remedy(name: str) -> str:
    return f"fetch it again with: fedlalr data fetch {name}"


def _digest(arrays: Arrays) -> str:
    digest = hashlib.sha256()
    for key in sorted(arrays):
        array = arrays[key]
        digest.update(f"{key} {array.dtype.str} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
