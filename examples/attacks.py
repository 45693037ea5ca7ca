"""What hostile clients do to a federation, and what each defence saves.

    python examples/attacks.py                          the whole table (minutes)
    python examples/attacks.py rounds=10                a quick look
    python examples/attacks.py clients_per_round=30     larger cohorts, in which attackers are less often the majority

Some of the quickstart's hundred clients are attackers. They train honestly and then change what they send, knowing the
broadcast and working together. Every other part of the run is the library's own: the attack is an engine around the
engine, so screening, reduction and update see exactly what a real server would.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import fedlalr as fl
from fedlalr import config
from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.training import ENGINES
from fedlalr.training.interfaces import Buffers, Engine, Replies, Training, Work

Attack = Callable[[Slots, Slots, int, int], Slots]
"""From the attackers' honest uploads `[A, P]`, the broadcast, their number and the cohort's to what they send."""


def inflate(uploads: Slots, broadcast: Slots, attackers: int, cohort: int) -> Slots:
    """v̂ a hundred times too large: everybody's rate shrinks for good, because the maximum never forgets."""
    return uploads.replace(v_hat=100 * uploads.v_hat)


def deflate(uploads: Slots, broadcast: Slots, attackers: int, cohort: int) -> Slots:
    """v̂ so far below the truth that the mean comes back to its floor: m / √v̂ explodes."""
    floor = 1e-16
    return uploads.replace(v_hat=broadcast.v_hat - (broadcast.v_hat - floor) * cohort / attackers + 0 * uploads.v_hat)


def poison_momentum(uploads: Slots, broadcast: Slots, attackers: int, cohort: int) -> Slots:
    """x as it should be, m turned round and enlarged: the first steps of everybody's next round follow it."""
    return uploads.replace(m=-30 * uploads.m)


def flip_sign(uploads: Slots, broadcast: Slots, attackers: int, cohort: int) -> Slots:
    """The change of x turned round, three times as long."""
    return uploads.replace(x=broadcast.x - 3 * (uploads.x - broadcast.x))


def scale(uploads: Slots, broadcast: Slots, attackers: int, cohort: int) -> Slots:
    """The change of x twenty times as long."""
    return uploads.replace(x=broadcast.x + 20 * (uploads.x - broadcast.x))


ATTACKS: dict[str, Attack] = {
    "v̂ inflation": inflate,
    "v̂ deflation": deflate,
    "momentum poison": poison_momentum,
    "sign flip": flip_sign,
    "scaling": scale,
}


class AttackedEngine:
    """An engine some of whose clients send what an attack makes of their replies."""

    def __init__(self, inner: Engine, attack: Attack, attackers: Tensor) -> None:
        self.inner, self.attack, self.attackers = inner, attack, attackers
        self.name = f"attacked {inner.name}"

    def train(self, work: Work) -> Replies:
        replies = self.inner.train(work)
        rows = torch.nonzero(torch.isin(replies.clients, self.attackers)).flatten()
        if not len(rows):
            return replies
        mine = replies.slots.map(lambda values: values[rows])
        sent = self.attack(mine, work.broadcast, len(rows), len(replies.clients))
        slots = {name: values.clone() for name, values in replies.slots.items()}
        for name, values in slots.items():
            values[rows] = sent[name]
        return replace(replies, slots=Slots(**slots))

    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        return self.inner.recalibrate(x, buffers, clients, round)

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Trusting(fl.FedLALR):
    """FedLALR without the rule that v̂ cannot fall, to show what the rule is worth."""

    @property
    def slots(self) -> SlotTable:
        return replace(super().slots, grows=())


@dataclass(frozen=True)
class Defence:
    """How a server protects itself."""

    name: str
    algorithm: type[fl.FedLALR] = fl.FedLALR
    max_norm_ratio: float | None = 1000.0
    reduce: object = None

    def on_all(self) -> dict[str, object] | None:
        return None if self.reduce is None else dict.fromkeys(("x", "m", "v_hat"), self.reduce)


DEFENCES = (
    Defence("none", Trusting, max_norm_ratio=None),
    Defence("default"),
    Defence("bound 5", max_norm_ratio=5.0),
    Defence("bounded", reduce=fl.Bounded(1.0)),
    Defence("trimmed", reduce=fl.Trimmed(0.3)),
    Defence("median", reduce=fl.Median()),
)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the last accuracy, or the round that failed, and how many replies were refused."""

    accuracy: float | None
    refused: int
    failed: int | None = None

    def __str__(self) -> str:
        return f"fails at {self.failed}" if self.accuracy is None else f"{self.accuracy:.1%}"


def run(attack: Attack | None, share: float, defence: Defence, overrides: Sequence[str] = ()) -> Outcome:
    """The quickstart with a share of its clients hostile."""
    preset = config.load("quickstart", overrides)
    population = config.build_population(preset)
    hyperparameters = {k: tuple(v) if isinstance(v, list) else v for k, v in preset.algorithm.options.items()}
    generator = torch.Generator().manual_seed(preset.seed)
    attackers = torch.randperm(len(population), generator=generator)[: round(share * len(population))]
    last: list[fl.Record] = []

    class Remember(fl.Observer):
        def on_round(self, record: fl.Record) -> None:
            last.append(record)

    def engine(training: Training) -> Engine:
        honest = ENGINES["stacked"](training)
        return honest if attack is None else AttackedEngine(honest, attack, attackers)

    failed = None
    try:
        fl.run(
            config.build_model(preset.model, population, preset.seed),
            population,
            defence.algorithm(**hyperparameters),
            rounds=preset.rounds,
            clients_per_round=preset.clients_per_round,
            local=fl.Epochs(preset.local.epochs or 1),
            batch_size=preset.batch_size,
            reduce=defence.on_all(),
            max_norm_ratio=defence.max_norm_ratio,
            seed=preset.seed,
            engine=engine,
            observers=[Remember()],
        )
    except fl.RoundFailed:
        failed = len(last) + 1
    refused = sum(len(record.rejected) for record in last)
    return Outcome(None if failed or not last else last[-1].accuracy, refused, failed)


def table(shares: Sequence[float], overrides: Sequence[str]) -> None:
    """Print the final accuracy under every attack with every defence, as a Markdown table."""
    began = time.perf_counter()
    print(f"| attack | attackers | {' | '.join(defence.name for defence in DEFENCES)} |")
    print(f"|---|---|{'---|' * len(DEFENCES)}")
    honest = [str(run(None, 0.0, defence, overrides)) for defence in DEFENCES]
    print(f"| nobody | 0% | {' | '.join(honest)} |", flush=True)
    for name, attack in ATTACKS.items():
        for share in shares:
            cells = [str(run(attack, share, defence, overrides)) for defence in DEFENCES]
            print(f"| {name} | {share:.0%} | {' | '.join(cells)} |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} seconds")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the quickstart's settings")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.3], help="shares of hostile clients")
    arguments = parser.parse_args()
    table(arguments.shares, arguments.overrides)
