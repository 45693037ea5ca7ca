"""Attacks by hostile clients: their damage, the effect of each defence, and its cost for honest clients.

    python examples/attacks.py                          all tables (minutes)
    python examples/attacks.py rounds=10                a quick look
    python examples/attacks.py clients_per_round=30     larger cohorts, in which attackers are less often the majority

Some of the quickstart's hundred clients are attackers. They train honestly and then change their uploads, knowing the
broadcast and colluding; the uploads are so large that only a bound limits them. Everything else is the library's code:
the attack is an engine that wraps an engine, so screening, reduction and update see exactly what a real server would
see. The last table has no attackers: three honest clients of a hundred have a class that no other client has.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import fedlalr as fl
from fedlalr import config
from fedlalr.algorithms.slots import Slots, SlotTable
from fedlalr.federation.sampling import sample
from fedlalr.training.engines.registry import ENGINES
from fedlalr.training.interfaces import Buffers, Engine, Replies, Training, Work

Named = Mapping[str, Tensor]
Attack = Callable[[Named, Named, int, int], Named]
"""Maps the attackers' honest uploads (slots and buffers, one row each), the broadcast, the number of attackers and the
size of the cohort to the slots and buffers that they send instead."""

FAR = 1000.0
"""Factor by which an attacker's change is too long."""
STRIKES = 4
"""Rounds with an attack if attackers cannot predict cohorts."""
RARE = 3
"""Clients of a hundred that have the rare class."""


def reverse_x(uploads: Named, broadcast: Named, attackers: int, cohort: int) -> Named:
    """A long step against the direction of honest training."""
    return {"x": broadcast["x"] - FAR * (uploads["x"] - broadcast["x"]).mean(0)}


def flip_sign(uploads: Named, broadcast: Named, attackers: int, cohort: int) -> Named:
    """The change of x reversed, three times as long: short enough to pass every bound."""
    return {"x": broadcast["x"] - 3 * (uploads["x"] - broadcast["x"])}


def poison_momentum(uploads: Named, broadcast: Named, attackers: int, cohort: int) -> Named:
    """Honest x, but m reversed and enlarged: all clients' first steps of the next round follow it."""
    return {"m": -FAR * uploads["m"]}


def inflate(uploads: Named, broadcast: Named, attackers: int, cohort: int) -> Named:
    """v̂ far too large: all clients' learning rates shrink permanently, because the maximum never decreases."""
    return {"v_hat": FAR * uploads["v_hat"]}


def deflate(uploads: Named, broadcast: Named, attackers: int, cohort: int) -> Named:
    """v̂ so far below its true value that the mean drops to its floor: m / √v̂ explodes."""
    floor, v_hat = 1e-16, broadcast["v_hat"]
    return {"v_hat": v_hat - (v_hat - floor) * cohort / attackers + 0 * uploads["v_hat"]}


def shift_buffers(uploads: Named, broadcast: Named, attackers: int, cohort: int) -> Named:
    """Honest x, but statistics of the normalisation layer far from their true values."""
    return {name: uploads[name] + FAR for name in uploads if name.endswith(("running_mean", "running_var"))}


ATTACKS: dict[str, Attack] = {
    "x reversed": reverse_x,
    "x sign flip": flip_sign,
    "m reversed": poison_momentum,
    "v̂ inflation": inflate,
    "v̂ deflation": deflate,
    "buffers": shift_buffers,
}


class AttackedEngine:
    """An engine in which some clients attack: their replies are changed, in every round or in some."""

    def __init__(self, inner: Engine, attack: Attack, attackers: Tensor, rounds: Collection[int] | None = None) -> None:
        self.inner, self.attack, self.attackers, self.rounds = inner, attack, attackers, rounds
        self.name = f"attacked {inner.name}"

    def train(self, work: Work) -> Replies:
        replies = self.inner.train(work)
        honest = {**replies.slots, **replies.buffers}
        sent = self._attacked(honest, {**work.broadcast, **work.buffers}, replies.clients, work.round)
        slots = Slots(**{name: sent[name] for name in replies.slots})
        return replace(replies, slots=slots, buffers={name: sent[name] for name in replies.buffers})

    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        honest = self.inner.recalibrate(x, buffers, clients, round)
        return self._attacked(honest, buffers, clients, round) if self.attack is shift_buffers else honest

    def _attacked(self, honest: Named, broadcast: Named, clients: Tensor, round: int) -> dict[str, Tensor]:
        rows = torch.nonzero(torch.isin(clients, self.attackers)).flatten()
        if not len(rows) or (self.rounds is not None and round not in self.rounds):
            return dict(honest)
        mine = {name: values[rows] for name, values in honest.items()}
        changed = {name: values.clone() for name, values in honest.items()}
        for name, values in self.attack(mine, broadcast, len(rows), len(clients)).items():
            changed[name][rows] = values
        return changed

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Trusting(fl.FedLALR):
    """FedLALR without the rule that v̂ cannot decrease, to show the effect of the rule."""

    @property
    def slots(self) -> SlotTable:
        return replace(super().slots, grows=())


@dataclass(frozen=True)
class Defence:
    """A defence of the server."""

    name: str
    algorithm: type[fl.FedLALR] = fl.FedLALR
    max_norm_ratio: float | None = 10.0
    reduce: object = None

    def options(self) -> dict[str, object]:
        how = None if self.reduce is None else dict.fromkeys(("x", "m", "v_hat"), self.reduce)
        return {"max_norm_ratio": self.max_norm_ratio, "reduce": how}


DEFENCES = (
    Defence("none", Trusting, max_norm_ratio=None),
    Defence("default"),
    Defence("bound 5", max_norm_ratio=5.0),
    Defence("bounded", reduce=fl.reductions.Bounded(1.0)),
    Defence("trimmed", reduce=fl.reductions.Trimmed(0.3)),
    Defence("median", reduce=fl.reductions.Median()),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run: the last accuracy and the lowest of its second half, or the failed round."""

    accuracy: float | None
    lowest: float | None
    rejected: int
    failed: int | None = None

    def __str__(self) -> str:
        if self.accuracy is None or self.lowest is None:
            return f"fails at {self.failed}"
        return f"{100 * self.accuracy:.1f} / {100 * self.lowest:.1f}"


class Remember(fl.Observer):
    """Keeps the records of a run that may fail."""

    def __init__(self) -> None:
        self.records: list[fl.Record] = []

    def on_round(self, record: fl.Record) -> None:
        self.records.append(record)


def run(
    attack: Attack | None, share: float, defence: Defence, overrides: Sequence[str] = (), timing: str = "always"
) -> Outcome:
    """Run the quickstart with batch normalisation and a share of hostile clients.

    Attackers attack always; only when they are the majority ("cohorts known"); or in `STRIKES` random rounds ("cohorts
    secret").
    """
    preset = config.load("quickstart", overrides)
    population = config.build_population(preset)
    hyperparameters = {k: tuple(v) if isinstance(v, list) else v for k, v in preset.algorithm.options.items()}
    generator = torch.Generator().manual_seed(preset.seed)
    attackers = torch.randperm(len(population), generator=generator)[: round(share * len(population))]
    cohort = preset.clients_per_round or len(population)
    rounds = None
    if timing != "always":
        cohorts = [sample(len(population), cohort, preset.seed, t) for t in range(1, preset.rounds + 1)]
        rounds = {t for t, drawn in enumerate(cohorts, 1) if 2 * torch.isin(drawn, attackers).sum() > cohort}
        if timing == "cohorts secret":
            rounds = {t + 1 for t in torch.randperm(preset.rounds, generator=generator)[:STRIKES].tolist()}

    def engine(training: Training) -> Engine:
        honest = ENGINES["stacked"](training)
        return honest if attack is None else AttackedEngine(honest, attack, attackers, rounds)

    torch.manual_seed(preset.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    kept, failed = Remember(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.RepliesRejected)
        try:
            fl.run(
                model,
                population,
                defence.algorithm(**hyperparameters),
                rounds=preset.rounds,
                clients_per_round=cohort,
                local=fl.Epochs(preset.local.epochs or 1),
                batch_size=preset.batch_size,
                buffers=preset.buffers,
                seed=preset.seed,
                engine=engine,
                observers=[kept],
                **defence.options(),
            )
        except fl.RoundFailed:
            failed = len(kept.records) + 1
    accuracies = [record.accuracy or 0.0 for record in kept.records]
    rejected = sum(len(record.rejected) for record in kept.records)
    if failed or not accuracies:
        return Outcome(None, None, rejected, failed)
    return Outcome(accuracies[-1], min(accuracies[len(accuracies) // 2 :]), rejected)


def rare_population(seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """A hundred clients with separable data, of which only the first `RARE` have the last of five classes, and test
    sets of that class and of the others."""
    generator = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(5, 20, generator=generator)

    def draw(labels: Tensor) -> tuple[Tensor, Tensor]:
        return centres[labels] + torch.randn(len(labels), 20, generator=generator), labels

    clients = [
        draw(torch.full((40,), 4) if client < RARE else torch.randint(0, 4, (40,), generator=generator))
        for client in range(100)
    ]
    return clients, draw(torch.full((200,), 4)), draw(torch.randint(0, 4, (200,), generator=generator))


def run_rare(defence: Defence, algorithm: fl.FedLALR, rounds: int = 100) -> tuple[float, float, fl.Result]:
    """Accuracies on the rare class and on the others after a run without attackers."""
    clients, rare, others = rare_population()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 5))
    result = fl.run(
        model, clients, algorithm, rounds=rounds, clients_per_round=10, local=fl.Epochs(3), batch_size=10,
        engine="stacked", **defence.options(),
    )  # fmt: skip
    with torch.no_grad():
        first, second = ((result.model(x).argmax(1) == y).double().mean().item() for x, y in (rare, others))
    return first, second, result


def attack_table(shares: Sequence[float], overrides: Sequence[str]) -> None:
    """Print the last accuracy, and the lowest of the second half, for every attack and defence."""
    print_row("attack", "attackers", *(defence.name for defence in DEFENCES))
    print_row(*["---"] * (2 + len(DEFENCES)))
    print_row("nobody", "0%", *(run(None, 0.0, defence, overrides) for defence in DEFENCES))
    for name, attack in ATTACKS.items():
        for share in shares:
            print_row(name, f"{share:.0%}", *(run(attack, share, defence, overrides) for defence in DEFENCES))
    again = [*overrides, "buffers=recalibrate"]
    print_row("nobody, recalibrated", "0%", *(run(None, 0.0, defence, again) for defence in DEFENCES))
    for share in shares:
        outcomes = (run(shift_buffers, share, defence, again) for defence in DEFENCES)
        print_row("buffers, recalibrated", f"{share:.0%}", *outcomes)
    for timing in ("cohorts known", "cohorts secret"):
        for share in shares:
            outcomes = (run(reverse_x, share, defence, overrides, timing) for defence in DEFENCES)
            print_row(f"x reversed, {timing}", f"{share:.0%}", *outcomes)


def rare_table() -> None:
    """Print the accuracy with each defence on a class that only three honest clients of a hundred have."""
    print("\nNo attackers; accuracy on a class that only 3 of 100 clients have / on the others:\n")
    print_row("rate", *(defence.name for defence in DEFENCES))
    print_row(*["---"] * (1 + len(DEFENCES)))
    for lr in (0.03, 0.05, 0.1):
        runs = [run_rare(defence, defence.algorithm(lr=lr)) for defence in DEFENCES]
        print_row(f"{lr:g}", *(f"{rare:.0%} / {others:.0%}" for rare, others, _ in runs))


def print_row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the quickstart's settings")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.02, 0.1, 0.3], help="shares of hostile clients")
    arguments = parser.parse_args()
    start = time.perf_counter()
    attack_table(arguments.shares, arguments.overrides)
    rare_table()
    print(f"\n{time.perf_counter() - start:.0f} seconds")
