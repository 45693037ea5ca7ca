"""Uploads wait on disk until a round closes: the server's memory does not grow with the number of replies.

The weight of a reply is known only after the last reply: the bound on its norm is relative to the cohort, and robust
reductions need all replies at once. So uploads are written to disk on arrival, and reduced a range of coordinates at a
time, over all replies in the order of the clients' ids.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots


class Spool:
    """One file per slot, one row per upload. The files have no name, so they disappear however the process ends."""

    def __init__(self, names: Sequence[str], size: int, dtype: torch.dtype, folder: str | Path | None = None) -> None:
        self.size, self.dtype = size, dtype
        self.rows = 0
        self._row_bytes = size * dtype.itemsize
        self._folder = Path(folder or tempfile.gettempdir())
        self._files: dict[str, IO[bytes]] = {}
        with self._explained():
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                self._files[name] = tempfile.TemporaryFile(prefix=".fedlalr-", dir=self._folder)  # noqa: SIM115

    def append(self, slots: Slots) -> int:
        """Write one upload, `[P]` per slot, and return its row."""
        for name, file in self._files.items():
            array = slots[name].detach().to("cpu", self.dtype).contiguous().numpy()
            rest, offset = memoryview(array.data).cast("B"), self.rows * self._row_bytes
            with self._explained():
                while rest:
                    written = os.pwrite(file.fileno(), rest, offset)
                    rest, offset = rest[written:], offset + written
        self.rows += 1
        return self.rows - 1

    def read(self, name: str, rows: Sequence[int], start: int, stop: int) -> Tensor:
        """A range of coordinates of the given uploads, `[len(rows), stop − start]`."""
        found = torch.empty(len(rows), stop - start, dtype=self.dtype)
        for into, row in enumerate(rows):
            rest = memoryview(found[into].numpy().data).cast("B")
            offset = row * self._row_bytes + start * self.dtype.itemsize
            while rest:
                count = os.preadv(self._files[name].fileno(), [rest], offset)
                if count == 0:
                    raise OSError(f"the spooled upload {row} of {name} is truncated")
                rest, offset = rest[count:], offset + count
        return found

    def close(self) -> None:
        """Free the disk space."""
        for file in self._files.values():
            file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the folder in errors of the operating system: it may differ from the run directory."""
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"uploads cannot be stored in {self._folder} until their round closes ({error.strerror}); free disk "
                f"space there, or choose another folder with spool_dir",
            ) from error
