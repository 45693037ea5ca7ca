"""What a client keeps between its rounds (SCAFFOLD's c_i), on the disk of its own node.

    folder/RUN/client-000002/round-000007.safetensors      what the client keeps if its reply of round 7 is accepted

A client does not know at the end of a round whether its reply will be accepted, so it stores the new value beside the
old ones. The next instruction says which round's value counts, and which are so old that the server, even if it falls
back on its last checkpoint but one, can no longer ask for them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedlalr.algorithms.slots import Slots

_RUN = re.compile(r"[0-9a-f]{1,64}")


class KeptStore:
    """The versions that one client has of what it keeps in one run."""

    def __init__(self, folder: str | Path, run: str, client: int) -> None:
        if not _RUN.fullmatch(run):
            raise ValueError(f"the run is called {run[:80]!r}, and up to 64 hexadecimal digits are expected")
        self.folder = Path(folder) / run / f"client-{client:06d}"
        self.client = client

    def load(self, round: int, names: tuple[str, ...], like: Tensor) -> Slots:
        """What the client kept after a round; zeros, like the given vector, after round 0."""
        if round == 0 or not names:
            return Slots(**{name: torch.zeros_like(like) for name in names})
        place = self._place(round)
        try:
            found = load_file(place)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"client {self.client} was told to go on from what it kept after round {round}, but {place} is not "
                f"there (it has {', '.join(map(str, self.rounds())) or 'no rounds'}); bring the folder back, or begin "
                f"a new run"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{place}, which client {self.client} kept, cannot be read: {error}") from error
        for name in names:
            if name not in found or found[name].shape != like.shape or found[name].dtype != like.dtype:
                raise ValueError(f"{place} does not hold {name} of {len(like):,} {like.dtype} numbers")
        return Slots(**{name: found[name].to(like.device) for name in names})

    def save(self, round: int, kept: Slots) -> None:
        """Store what the client will keep if its reply of a round is accepted: the whole file or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        place = self._place(round)
        aside = place.with_name(f".{place.name}")
        with aside.open("wb") as file:
            file.write(save({name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}))
            file.flush()
            os.fsync(file.fileno())
        aside.replace(place)

    def forget(self, before: int) -> None:
        """Remove the versions older than a round."""
        for round in self.rounds():
            if round < before:
                self._place(round).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """The rounds of which there is a version, ascending."""
        return sorted(int(place.stem.removeprefix("round-")) for place in self.folder.glob("round-*.safetensors"))

    def _place(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"
