"""The state that a client keeps between rounds, on the disk of its node: kept slots such as SCAFFOLD's c_i, personal
parameters and local buffers.

    folder/RUN/client-000002/round-000007.safetensors      the client's state if its reply of round 7 is accepted

At the end of a round a client does not know whether its reply will be accepted, so it stores the new state next to the
old ones. The next instruction says which round's state is valid, and which states are too old to be requested, even if
the server falls back to its second-to-last checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedlalr.algorithms.slots import Slots
from fedlalr.common.files import write_whole

_RUN = re.compile(r"[0-9a-f]{1,64}")


class KeptStore:
    """The versions of one client's state in one run."""

    def __init__(self, folder: str | Path, run: str, client: int) -> None:
        if not _RUN.fullmatch(run):
            raise ValueError(f"the run's name must be up to 64 hexadecimal digits, not {run[:80]!r}")
        self.folder = Path(folder) / run / f"client-{client:06d}"
        self.client = client

    def load(self, round: int, first: Slots) -> Slots:
        """The state after a round; after round 0 the first one."""
        if round == 0 or not first:
            return first
        place = self._place(round)
        try:
            found = load_file(place)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"client {self.client} should continue from its state after round {round}, but {place} does not "
                f"exist (rounds found: {', '.join(map(str, self.rounds())) or 'none'}); restore the folder, or start "
                f"a new run"
            ) from None
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{place}, the state of client {self.client}, cannot be read: {error}") from error
        for name, like in first.items():
            if name not in found or found[name].shape != like.shape or found[name].dtype != like.dtype:
                raise ValueError(f"{place} does not contain {name} with {like.numel():,} {like.dtype} numbers")
        return Slots(**{name: found[name].to(like.device) for name, like in first.items()})

    def save(self, round: int, kept: Slots) -> None:
        """Store the state that is valid if the reply of a round is accepted. Writes the whole file or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = save({name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()})
        write_whole(self._place(round), content)

    def forget(self, before: int) -> None:
        """Remove the versions older than a round."""
        for round in self.rounds():
            if round < before:
                self._place(round).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """The rounds with a stored state, ascending."""
        return sorted(int(place.stem.removeprefix("round-")) for place in self.folder.glob("round-*.safetensors"))

    def _place(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"
