"""`fl.Async`, and the methods that it cannot be used with."""

from __future__ import annotations

from dataclasses import dataclass

from fedlalr.algorithms.slots import Algorithm
from fedlalr.common.option_types import Checked, Count, NotNegative
from fedlalr.federation.round import Rules


@dataclass(frozen=True)
class Async(Checked):
    """buffer: the server updates its model after this many replies.
    concurrency: clients that train at the same time.
    staleness: a reply whose version is s updates old has the weight (1 + s)^-staleness; 0: all weigh the same.
    delay_threshold: if the oldest reply is more than this many updates old, the server's rate is at most 1 / its
        staleness (FADAS); None: never.
    """

    buffer: Count = 10
    concurrency: Count = 50
    staleness: NotNegative = 0.5
    delay_threshold: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buffer > self.concurrency:
            raise ValueError(
                f"buffer is {self.buffer}, but only {self.concurrency} clients train at the same time, and each trains "
                f"once with a version of the model; use a buffer of at most concurrency"
            )

    def check_cohort(self, clients_per_round: int | None, population: int, min_clients: int) -> int:
        """The number of clients that train at the same time."""
        if clients_per_round is not None:
            raise ValueError(
                f"clients_per_round is {clients_per_round}, but in an asynchronous run concurrency says how many "
                f"clients train at the same time; leave clients_per_round out, or set it to null in a preset"
            )
        if self.concurrency > population:
            raise ValueError(
                f"concurrency is {self.concurrency}, but there are only {population} clients; use at most {population}"
            )
        if min_clients > self.buffer:
            raise ValueError(
                f"min_clients is {min_clients}, but an update takes {self.buffer} replies; use at most {self.buffer}"
            )
        return self.concurrency

    def check_method(self, algorithm: Algorithm, rules: Rules) -> None:
        """Reject methods and compressions for which a stale reply has no meaning."""
        table, name = algorithm.slots, type(algorithm).__name__
        if maxima := [slot for slot, how in table.up.items() if how == "max"]:
            raise ValueError(
                f"{name} reduces {', '.join(maxima)} by the maximum, in which a stale reply cannot weigh less; in an "
                f"asynchronous run all slots must be averaged, as with second_moment='mean'"
            )
        if table.kept:
            raise ValueError(
                f"clients of {name} keep {', '.join(table.kept)} between their rounds, in full, but in an asynchronous "
                f"run the server takes only a part of a stale reply, and the two no longer match; use another method"
            )
        if every := [slot for slot, rounds in rules.compression.every.items() if rounds > 1]:
            raise ValueError(
                f"compression sends {', '.join(every)} only in some rounds, but the replies of an asynchronous update "
                f"are of different rounds; use compression='balanced', or leave `every` out"
            )
