"""Whose reply was accepted last in which round: the server's side of what clients keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from fedlalr.federation.storage.journal import KEPT


class Ledger:
    """For each client the round whose kept value counts, now and in every checkpoint that a run may go back to."""

    def __init__(self, accepted: Mapping[str, int] | None = None) -> None:
        self._accepted = {int(client): round for client, round in (accepted or {}).items()}
        self._saved: deque[dict[int, int]] = deque(maxlen=KEPT)

    def note(self, round: int, clients: Iterable[int]) -> None:
        """Take down whose replies a round accepted."""
        self._accepted |= dict.fromkeys(clients, round)

    def saved(self) -> None:
        """Take down that a checkpoint has the present state."""
        self._saved.append(dict(self._accepted))

    def kept(self, client: int) -> int:
        """The round after which what a client keeps is as the server counts it; 0 where it has kept nothing yet."""
        return self._accepted.get(client, 0)

    def settled(self, client: int) -> int:
        """The oldest round whose value may still be asked for; 0 until as many checkpoints are there as stay."""
        return self._saved[0].get(client, 0) if len(self._saved) == KEPT else 0

    def as_dict(self) -> dict[str, int]:
        """What a checkpoint stores."""
        return {str(client): round for client, round in sorted(self._accepted.items())}
