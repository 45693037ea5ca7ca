"""Uploads wait on disk until a round closes: the server's memory does not grow with the number of replies.

Whether a reply counts, and with which weight, is known only when the last one is in: the bound on its norm is relative
to the cohort, and robust reductions look at all replies at once. So an upload is written down as it comes, and reduced
some coordinates at a time, over all replies in the order of the clients' ids.
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
    """One file a slot, a row an upload. The files have no name, so nothing is left of them after any end."""

    def __init__(self, names: Sequence[str], size: int, dtype: torch.dtype, folder: str | Path | None = None) -> None:
        self.size, self.dtype = size, dtype
        self.rows = 0
        self._row_bytes = size * dtype.itemsize
        self._folder = Path(folder or tempfile.gettempdir())
        self._files: dict[str, IO[bytes]] = {}
        with self._told():
            self._folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                self._files[name] = tempfile.TemporaryFile(prefix=".fedlalr-", dir=self._folder)  # noqa: SIM115

    def append(self, slots: Slots) -> int:
        """Write one upload, `[P]` each slot, and give its row."""
        for name, file in self._files.items():
            array = slots[name].detach().to("cpu", self.dtype).contiguous().numpy()
            rest, offset = memoryview(array.data).cast("B"), self.rows * self._row_bytes
            with self._told():
                while rest:
                    written = os.pwrite(file.fileno(), rest, offset)
                    rest, offset = rest[written:], offset + written
        self.rows += 1
        return self.rows - 1

    def read(self, name: str, rows: Sequence[int], start: int, stop: int) -> Tensor:
        """Some coordinates of some uploads, `[len(rows), stop − start]`."""
        found = torch.empty(len(rows), stop - start, dtype=self.dtype)
        for into, row in enumerate(rows):
            rest = memoryview(found[into].numpy().data).cast("B")
            offset = row * self._row_bytes + start * self.dtype.itemsize
            while rest:
                count = os.preadv(self._files[name].fileno(), [rest], offset)
                if count == 0:
                    raise OSError(f"the spooled upload {row} of {name} ends too early")
                rest, offset = rest[count:], offset + count
        return found

    def close(self) -> None:
        """Give the disk space back."""
        for file in self._files.values():
            file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Say what the operating system refuses: the folder may be another than the run's."""
        try:
            yield
        except OSError as error:
            raise OSError(
                error.errno,
                f"uploads cannot wait in {self._folder} until their round closes ({error.strerror}); make room there, "
                f"or choose another folder by spool_dir",
            ) from error
