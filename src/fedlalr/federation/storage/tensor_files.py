"""Named tensors in files, whose length and hash are recorded when they are written and verified when they are read.

What the clients keep is on disk beside the checkpoints, and only changes are written. A population may keep far more
than the server does, and a round only changes what its cohort keeps. So every checkpoint adds one file with the rows
that changed since the last one, and its description says which client's row is in which file. If more than half of all
rows are out of date, everything is written again. If there are `FILES` files, the next one includes the rows of the
smaller half of them. Old files stay until no checkpoint refers to them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.common.files import write_bytes
from fedlalr.common.reading import read_file
from fedlalr.training.interfaces import real_numbers
from fedlalr.training.memory import free_memory

LARGEST_HEADER = 1 << 24
"""Most bytes for the names and shapes of a file's tensors."""


class Seal(NamedTuple):
    """Length and hash of a file when it was written."""

    bytes: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Seal:
    """Write tensors and flush them to disk, without a copy of those that are on the CPU."""
    parts = _parts({name: storable(tensor).to("cpu").contiguous() for name, tensor in tensors.items()})
    write_bytes(path, *parts)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return Seal(sum(len(part) for part in parts), digest.hexdigest())


def _parts(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """A file in the format of safetensors: the length of a header, the header, and the numbers, large types first so
    that all are aligned."""
    header: dict[str, Any] = {}
    contents: list[bytes | memoryview] = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _type_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [begin, end]}
        contents.append(tensor.reshape(-1).view(torch.uint8).numpy().data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *contents]


@cache
def _type_name(dtype: torch.dtype) -> str:
    """What the format calls a type, from a header that the library writes."""
    return str(json.loads(save({"": torch.empty(0, dtype=dtype, device="cpu")})[8:])[""]["dtype"])


def read_tensors(path: Path, seal: Seal, expected: int | None = None) -> dict[str, Tensor]:
    """The tensors of a file; raises `ValueError` if its length or hash does not match the seal.

    `expected` is the most bytes of tensors that can be in it, if known: the seal itself may be forged.
    """
    size = path.stat().st_size
    if size != seal.bytes:
        raise ValueError(f"{path.name} is damaged: it has {size:,} bytes, but {seal.bytes:,} were written")
    largest = free_memory(torch.device("cpu")) if expected is None else expected + LARGEST_HEADER
    content = read_file(path, largest)
    if hashlib.sha256(content).hexdigest() != seal.sha256:
        raise ValueError(f"{path.name} is damaged: its content does not match the hash taken when it was written")
    return load(content)


def take(tensors: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Pop a tensor and move it to `like`'s device; raises `ValueError` if its shape or dtype differs from `like`'s."""
    if name not in tensors:
        raise ValueError(f"there is no {name} in it")
    found = tensors.pop(name)
    if like.dtype == torch.complex128 and found.shape == (*like.shape, 2):
        found = torch.view_as_complex(found)
    if found.shape != like.shape or found.dtype != like.dtype:
        raise ValueError(
            f"its {name} is {tuple(found.shape)} {found.dtype}, but this run's is {tuple(like.shape)} {like.dtype}"
        )
    return found.to(like.device)


def storable(tensor: Tensor) -> Tensor:
    """The tensor; complex128, which the format does not support, as pairs of real numbers."""
    tensor = tensor.detach()
    return real_numbers(tensor) if tensor.dtype == torch.complex128 else tensor


FILES = 64
"""The most files that one checkpoint refers to. Merging only the smaller half avoids rewriting large files: with 2,000
clients, one per round, a row is written 2.8 times on average."""

_NAME = re.compile(r"kept-\d{6,}\.safetensors")
_CLIENTS = "clients"


@dataclass
class KeptFiles:
    """The files in a folder of checkpoints, and which client's row is in which file."""

    folder: Path
    _seals: dict[str, Seal] = field(default_factory=dict)
    _rows: dict[str, int] = field(default_factory=dict)
    """Rows in each file, including those that are out of date."""
    _place: dict[int, str] = field(default_factory=dict)
    """The file with each client's row."""
    _saved: dict[int, Slots] = field(default_factory=dict)
    """The saved slots of each client. Changes are found by identity, as a state is never changed in place."""

    def save(self, round: int, kept: Mapping[int, Slots]) -> list[dict[str, Any]]:
        """Write what has changed, and return a description of where everything is."""
        self._forget(self._place.keys() - kept.keys())
        changed = [client for client in sorted(kept) if self._saved.get(client) is not kept[client]]
        rows = sum(self._rows.values()) + len(changed)
        if rows > 2 * len(kept):
            changed = sorted(kept)
        elif changed and len(self._seals) >= FILES:
            changed = sorted({*changed, *self._in_smallest(FILES // 2)})
        if changed:
            name = f"kept-{round:06d}.safetensors"
            aside = self.folder / f".writing-{name}"
            try:
                seal = write_tensors(aside, _stacked(kept, changed))
                aside.rename(self.folder / name)
            except BaseException:
                aside.unlink(missing_ok=True)
                raise
            self._note(name, seal, len(changed), {client: kept[client] for client in changed})
        return self._describe()

    def load(self, description: Iterable[Mapping[str, Any]], like: Slots) -> dict[int, Slots]:
        """Read the files of a description; raises `ValueError` or similar if invalid. `like` is one client's row."""
        self._seals, self._rows, self._place, self._saved = {}, {}, {}, {}
        for entry in description:
            name, wanted = entry["file"], entry["clients"]
            if not _NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a file of kept slots")
            seal = Seal(entry["bytes"], entry["sha256"])
            tensors = read_tensors(self.folder / name, seal)
            clients = tensors.pop(_CLIENTS).tolist()
            stacks = {slot: take(tensors, slot, row.expand(len(clients), *row.shape)) for slot, row in like.items()}
            if tensors:
                raise ValueError(f"{name} holds {', '.join(sorted(tensors))}, which this run does not have")
            at = {client: place for place, client in enumerate(clients)}
            found = {c: Slots(**{slot: stack[at[c]].clone() for slot, stack in stacks.items()}) for c in wanted}
            self._note(name, seal, len(clients), found)
        return dict(self._saved)

    def prune(self, used: Iterable[str]) -> None:
        """Remove the files that no checkpoint uses any more."""
        there = list(self.folder.glob("kept-*.safetensors"))
        if there:
            used = {*used, *self._seals}
            for file in there:
                if file.name not in used:
                    file.unlink(missing_ok=True)

    def _in_smallest(self, count: int) -> list[int]:
        """The clients whose rows are in the files with the fewest current rows."""
        files = {name for name, _ in sorted(Counter(self._place.values()).items(), key=itemgetter(1))[:count]}
        return [client for client, name in self._place.items() if name in files]

    def _note(self, name: str, seal: Seal, rows: int, clients: Mapping[int, Slots]) -> None:
        self._seals[name], self._rows[name] = seal, rows
        self._saved |= clients
        self._place |= dict.fromkeys(clients, name)
        self._forget(())

    def _forget(self, clients: Iterable[int]) -> None:
        """Forget clients that keep nothing any more, and files without a current row."""
        for client in clients:
            del self._place[client], self._saved[client]
        live = set(self._place.values())
        for old in [file for file in self._seals if file not in live]:
            del self._seals[old], self._rows[old]

    def _describe(self) -> list[dict[str, Any]]:
        clients: dict[str, list[int]] = {name: [] for name in self._seals}
        for client, name in sorted(self._place.items()):
            clients[name].append(client)
        return [{"file": name, **seal._asdict(), "clients": clients[name]} for name, seal in self._seals.items()]


def _stacked(kept: Mapping[int, Slots], clients: list[int]) -> dict[str, Tensor]:
    slots = list(kept[clients[0]])
    return {
        _CLIENTS: torch.tensor(clients, device="cpu"),
        **{slot: torch.stack([kept[client][slot] for client in clients]) for slot in slots},
    }
