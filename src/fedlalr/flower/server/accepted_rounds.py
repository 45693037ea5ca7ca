"""The round of each client's last accepted reply: the server's view of the state that clients keep."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from fedlalr.federation.storage.journal import KEPT


class AcceptedRounds:
    """The round whose kept state is valid, for each client, now and in every checkpoint that a run may resume from."""

    def __init__(self, accepted: Mapping[str, int] | None = None) -> None:
        self._accepted = {int(client): round for client, round in (accepted or {}).items()}
        self._saved: deque[dict[int, int]] = deque(maxlen=KEPT)

    def note(self, round: int, clients: Iterable[int]) -> None:
        """Record the clients whose replies a round accepted."""
        self._accepted |= dict.fromkeys(clients, round)

    def saved(self) -> None:
        """Record that a checkpoint contains the current state."""
        self._saved.append(dict(self._accepted))

    def kept(self, client: int) -> int:
        """The round whose kept state of a client is valid; 0 if the client has none yet."""
        return self._accepted.get(client, 0)

    def settled(self, client: int) -> int:
        """The oldest round whose state may still be requested; 0 until the maximum number of checkpoints exists."""
        return self._saved[0].get(client, 0) if len(self._saved) == KEPT else 0

    def as_dict(self) -> dict[str, int]:
        """The content for a checkpoint."""
        return {str(client): round for client, round in sorted(self._accepted.items())}
