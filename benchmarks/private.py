"""Accuracy of private methods at equal ε, equally tuned: DP-FedAvg, DP-FedAdam and private FedLALR in several forms.

    python benchmarks/private.py solve digits --epsilon 8                       the noise (needs dp-accounting)
    python benchmarks/private.py tune digits --noise 1.316 --into tuned.jsonl   settings of each method, the best again
    python benchmarks/private.py final digits --noise 1.316 --tuned tuned.jsonl --seeds 5 --into final.jsonl
    python benchmarks/private.py table final.jsonl                              means, intervals, paired differences
    python benchmarks/private.py cost paper --rounds 6                          time of a round with and without privacy

Settings are chosen by the accuracy on a fifth of the training samples, which is held out; final runs train on all
samples, with other seeds for the weights, cohorts and noise, and are tested on the test set. Runs that a file of
results already has are not repeated, so the same command resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import fedlalr as fl
import gpu_run

TUNING_SEEDS = (1000, 1001, 1002, 1003)
"""All settings are tried with the first."""
Point = dict[str, float]
Row = dict[str, Any]
Job = tuple[str, Point, int]
"""Method, setting, seed."""
SETTINGS = 16
"""Of each method, at most, where the grid is a cross."""


@dataclass(frozen=True)
class Problem:
    """A data set, its clients, and how long they train."""

    data: str
    model: Callable[[], nn.Module]
    clients: int
    cohort: int
    rounds: int
    steps: int
    batch: int
    finalists: int = 2
    """The best settings of a method, which are tried again: one seed would choose by luck."""
    seeds: int = 3
    """The tuning seeds that finalists are tried with."""
    beta2: float = 0.9
    """Of FedLALR. Five local steps are too few for an average over two hundred."""
    adam_eps: float = 1e-4


PROBLEMS = {
    "digits": Problem(
        "digits",
        lambda: fl.models.MLP(64, 32, 10),
        clients=480,
        cohort=96,
        rounds=100,
        steps=5,
        batch=4,
        finalists=5,
        seeds=4,
        beta2=0.995,
        adam_eps=1e-3,
    ),
    "cifar10": Problem("cifar10", lambda: fl.models.CNN(10, 3, 32), 10_000, cohort=400, rounds=100, steps=5, batch=5),
    "shakespeare": Problem(
        "shakespeare", lambda: fl.models.GPT(80, 80, 32, 2, 2), 10_673, cohort=400, rounds=100, steps=5, batch=4
    ),
}
WINDOWS = 4
"""Consecutive windows of 80 characters that a client of Shakespeare has, all from one role."""
_SGD = {"lr": (0.01, 0.03, 0.1, 0.3, 1.0), "server_lr": (0.003, 0.01, 0.03, 0.1), "clip": (0.1, 0.3, 1.0)}
_LALR = {"lr": (0.001, 0.003, 0.01, 0.03, 0.1), "eps": (0.01, 0.1, 1.0), "clip": (0.3, 1.0, 3.0, 10.0)}
_CIFAR_LALR = {"lr": (0.03, 0.1, 0.3), "eps": (0.03, 0.1, 0.3), "clip": (1.0, 2.0, 4.0)}
_TEXT_LALR = {"lr": (0.005, 0.01, 0.02), "eps": (3e-4, 1e-3, 3e-3), "clip": (0.5, 1.0, 2.0)}
GRIDS: dict[str, dict[str, dict[str, tuple[float, ...]]]] = {
    "digits": {
        "fedavg": {
            "lr": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
            "clip": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
        },
        "fedadam": _SGD,
        "fedadam, scaled": _SGD,
        "fedlalr": _LALR,
        "fedlalr, scaled": _LALR,
        "fedlalr, server": _LALR,
    },
    "cifar10": {
        "fedavg": {"lr": (0.05, 0.1, 0.2, 0.4), "clip": (0.5, 1.0, 2.0, 4.0)},
        "fedadam": {"lr": (0.01, 0.03, 0.1), "server_lr": (0.0015, 0.004, 0.01), "clip": (0.1, 0.3, 1.0)},
        "fedlalr": _CIFAR_LALR,
        "fedlalr, scaled": _CIFAR_LALR,
        "fedlalr, server": _CIFAR_LALR,
    },
    "shakespeare": {
        "fedavg": {"lr": (0.1, 0.2, 0.4, 0.8), "clip": (0.2, 0.35, 0.6, 1.0)},
        "fedadam": {"lr": (0.1, 0.3, 0.6), "server_lr": (0.003, 0.006, 0.015), "clip": (0.1, 0.3, 1.0)},
        "fedlalr": _TEXT_LALR,
        "fedlalr, scaled": _TEXT_LALR,
        "fedlalr, server": _TEXT_LALR,
    },
}
"""Digits: all combinations, 60 of each method. The others: a cross of 7, then neighbours of the best; see `untried`."""


def method(name: str, point: Point, noise: float, problem: Problem) -> tuple[fl.Algorithm, fl.Privacy]:
    """A method with its privacy. Units make the slots of FedLALR about equally long: m is about ε times as large as a
    change of x in α K, and v̂ about ε²."""
    base = {"clip": point["clip"], "noise_multiplier": noise}
    if name == "fedavg":
        return fl.FedAvg(lr=point["lr"]), fl.Privacy(**base)
    if name.startswith("fedadam"):
        adam = fl.FedAdam(lr=point["lr"], server_lr=point["server_lr"], eps=problem.adam_eps)
        return adam, fl.Privacy(**base, scaled="scaled" in name)
    lr, eps = point["lr"], point["eps"]
    algorithm = fl.FedLALR(lr=lr, eps=eps, betas=(0.9, problem.beta2))
    if name == "fedlalr, server":
        return replace(algorithm, momentum="restart"), fl.Privacy(**base, second_moment="server")
    length = lr * problem.steps
    units = {"m": eps / length, "v_hat": eps**2 / length}
    return algorithm, fl.Privacy(**base, units=units, scaled="scaled" in name)


def run(name: str, point: Point, seed: int, arguments: argparse.Namespace, *, tuning: bool) -> Row | None:
    """One run as a row: the mean accuracy after its last five rounds. None if the time is up."""
    if time.time() > arguments.began + arguments.limit:
        return None
    problem = PROBLEMS[arguments.problem]
    algorithm, privacy = method(name, point, arguments.noise, problem)
    torch.manual_seed(seed)
    row = {"problem": arguments.problem, "method": name, "seed": seed, "noise": arguments.noise, **point}
    try:
        result = fl.run(
            problem.model(),
            population(problem, tuning=tuning),
            algorithm,
            rounds=arguments.rounds or problem.rounds,
            clients_per_round=problem.cohort,
            local=fl.Steps(problem.steps),
            batch_size=problem.batch,
            privacy=privacy,
            seed=seed,
            device=arguments.device,
            dtype=arguments.dtype,
        )
    except fl.RoundFailed as failed:  # a rate that is too large, which is a result of tuning
        return row | {"accuracy": 0.0, "failed": str(failed)}
    last = [record.accuracy for record in result.history[-5:]]
    return row | {"accuracy": statistics.mean(last), "seconds": sum(record.seconds for record in result.history)}


def population(problem: Problem, *, tuning: bool) -> fl.data.Population:
    """The clients; for tuning, the last fifth of a shuffled training set is held out and replaces the test set."""
    whole = loaded(problem.data)
    inputs, targets = whole.inputs, whole.targets
    order = np.random.default_rng(0).permutation(len(targets))
    cut = len(order) * 4 // 5 if tuning else len(order)
    train, held_out = np.sort(order[:cut]), torch.from_numpy(np.sort(order[cut:]))
    if problem.data == "shakespeare":
        dealt = fl.data.partition(targets[:, -1].numpy()[train], None, "natural", ids=pieces(whole.partition)[train])
    else:
        dealt = fl.data.partition(targets.numpy()[train], problem.clients, "dirichlet", 0.3)
    test = (inputs[held_out], targets[held_out]) if tuning else whole.test
    tested = slice(None, None, max(1, len(test[1]) // (2_000 if tuning else 10_000)))
    dealt = fl.data.Partition(train[dealt.indices], dealt.offsets)
    return fl.data.Population(
        inputs, targets, dealt, transform=whole.transform, test=(test[0][tested], test[1][tested]), name=problem.data
    )


@cache
def loaded(name: str) -> fl.data.Population:
    """All samples; windows of Shakespeare by role."""
    if name == "shakespeare":
        return fl.data.load(name, clients=None, scheme="natural", sequence=True, train=None, test=None)
    return fl.data.load(name, clients=2, scheme="iid", augment=False)


def pieces(roles: fl.data.Partition) -> NDArray[np.int64]:
    """The client of each window: `WINDOWS` consecutive windows of a role are one client, the last may have fewer."""
    counts = -(-roles.sizes // WINDOWS)
    ends = np.cumsum(counts)
    found = np.empty(len(roles.indices), np.int64)
    for role, (end, count) in enumerate(zip(ends, counts, strict=True)):
        found[roles[role]] = end - count + np.arange(roles.sizes[role]) // WINDOWS
    return found


def points(problem: str, name: str) -> Iterator[Point]:
    """The settings of a method: every combination, or the middle ones with one option at a time changed."""
    grid = GRIDS[problem][name]
    middle = {option: values[len(values) // 2] for option, values in grid.items()}
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        if problem == "digits" or sum(point[option] != middle[option] for option in grid) <= 1:
            yield point


def tried(name: str, rows: list[Row]) -> dict[tuple[float, ...], dict[int, float]]:
    """The accuracy of each setting of a method, by seed."""
    found: dict[tuple[float, ...], dict[int, float]] = {}
    for row in rows:
        if row["method"] == name:
            setting = tuple(row[option] for option in GRIDS[row["problem"]][name])
            found.setdefault(setting, {})[row["seed"]] = row["accuracy"]
    return found


def untried(problem: str, name: str, rows: list[Row]) -> list[Point]:
    """The next settings: what is missing of the grid, then the neighbours of the best, also beyond the grid's edges."""
    scores = {setting: by_seed[TUNING_SEEDS[0]] for setting, by_seed in tried(name, rows).items()}
    missing = [point for point in points(problem, name) if tuple(point.values()) not in scores]
    if missing or problem == "digits":
        return missing
    axes = {option: extended(values) for option, values in GRIDS[problem][name].items()}
    best = dict(zip(axes, max(scores, key=lambda setting: scores[setting]), strict=True))
    around = [best | {option: axis[axis.index(best[option]) + way]} for option, axis in axes.items() for way in (-1, 1)]
    return [point for point in around if tuple(point.values()) not in scores][: max(0, SETTINGS - len(scores))]


def extended(values: tuple[float, ...], more: int = SETTINGS) -> list[float]:
    """The values of a grid, continued in both directions with the ratio of its outermost values."""
    low, high = values[1] / values[0], values[-1] / values[-2]
    below = [float(f"{values[0] / low**step:.2g}") for step in range(more, 0, -1)]
    return [*below, *values, *(float(f"{values[-1] * high**step:.2g}") for step in range(1, more + 1))]


def tune(arguments: argparse.Namespace) -> None:
    """Every setting with the first seed, then the best of each method with the others."""
    problem, names = arguments.problem, methods(arguments)
    rows = known(arguments.into)
    while jobs := [(name, point, TUNING_SEEDS[0]) for name in names for point in untried(problem, name, rows)]:
        if not (new := printed(jobs, arguments, tuning=True)):
            return
        rows += new
    again = []
    for name in names:
        found = tried(name, rows)
        best = sorted(found, key=lambda setting: -found[setting][TUNING_SEEDS[0]])[: PROBLEMS[problem].finalists]
        for setting in best:
            point = dict(zip(GRIDS[problem][name], setting, strict=True))
            again += [(name, point, seed) for seed in TUNING_SEEDS[1 : PROBLEMS[problem].seeds]]
    printed(again, arguments, tuning=True)


def known(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def methods(arguments: argparse.Namespace) -> list[str]:
    return arguments.methods or list(GRIDS[arguments.problem])


def printed(jobs: list[Job], arguments: argparse.Namespace, *, tuning: bool) -> list[Row]:
    """The rows of all jobs that are not in the file yet, added to it as they end; several processes keep a GPU busy,
    which one small model does not."""
    done, rows = known(arguments.into), []
    new = [
        (name, point, seed)
        for name, point, seed in jobs
        if seed not in tried(name, done).get(tuple(point.values()), {})
    ]
    with (
        arguments.into.open("a") as file,
        ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool,
    ):
        for ended in as_completed([pool.submit(run, *job, arguments, tuning=tuning) for job in new]):
            if (row := ended.result()) is not None:
                rows.append(row)
                print(json.dumps(row), file=file, flush=True)
    return rows


def chosen(name: str, rows: list[Row]) -> Point:
    """The setting with the best mean among those that were tried with all tuning seeds."""
    problem = rows[0]["problem"]
    finalists = {
        setting: statistics.mean(by_seed.values())
        for setting, by_seed in tried(name, rows).items()
        if len(by_seed) == PROBLEMS[problem].seeds
    }
    if not finalists:
        raise SystemExit(f"no setting of {name} was tried with all tuning seeds; run tune again, with a larger --limit")
    best = max(finalists, key=lambda setting: finalists[setting])
    return dict(zip(GRIDS[problem][name], best, strict=True))


def final(arguments: argparse.Namespace) -> None:
    tuned = known(arguments.tuned)
    best = {name: chosen(name, tuned) for name in methods(arguments)}
    printed([(name, best[name], seed) for seed in range(arguments.seeds) for name in best], arguments, tuning=False)


def table(arguments: argparse.Namespace) -> None:
    """A row for each method: its last setting, seeds, accuracy, and the differences to two others on common seeds."""
    from scipy.stats import t as student

    rows = [row for file in arguments.files for row in known(file)]

    def interval(values: list[float]) -> str:
        spread = statistics.stdev(values) / math.sqrt(len(values)) * student.ppf(0.975, len(values) - 1)
        return f"{100 * statistics.mean(values):.1f} ± {100 * spread:.1f}"

    print("| problem | method | setting | seeds | accuracy, % | difference to FedAvg | to FedAdam |")
    print("|---|---|---|---:|---:|---:|---:|")
    for problem in dict.fromkeys(row["problem"] for row in rows):
        mine = [row for row in rows if row["problem"] == problem]
        last = {row["method"]: {option: row[option] for option in GRIDS[problem][row["method"]]} for row in mine}
        found = {name: tried(name, mine)[tuple(point.values())] for name, point in last.items()}
        for name in (name for name in GRIDS[problem] if name in last):
            options = ", ".join(f"{option} {value:g}" for option, value in last[name].items())
            cells = [problem, name, options, str(len(found[name])), interval(list(found[name].values()))]
            for base in ("fedavg", "fedadam"):
                differences = [found[name][seed] - found[base][seed] for seed in found[name].keys() & found[base]]
                cells.append("–" if name == base else interval(differences))
            print(f"| {' | '.join(cells)} |")


def solve(arguments: argparse.Namespace) -> None:
    from fedlalr.federation.privacy.accounting import solve_noise_multiplier

    problem = PROBLEMS[arguments.problem]
    rate, rounds = problem.cohort / problem.clients, arguments.rounds or problem.rounds
    noise = solve_noise_multiplier(arguments.epsilon, rate, rounds, arguments.delta)
    print(json.dumps({"epsilon": arguments.epsilon, "delta": arguments.delta, "noise": noise, "rate": rate}))


class Clock(fl.Observer):
    """Wall and processor time after every round."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_round(self, record: fl.Record) -> None:
        gpu_run.synchronise()
        self.times.append((time.perf_counter(), time.process_time()))

    def rounds(self) -> list[tuple[float, float]]:
        """Of every round after the first two."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(self.times[1:])]


_JOINT = fl.Privacy(clip=1.0, noise_multiplier=1.0, units={"m": 0.1, "v_hat": 1e-2})
FORMS = {
    "plain": None,
    "private": _JOINT,
    "scaled": replace(_JOINT, scaled=True),
    "server": replace(_JOINT, units={}, second_moment="server"),
}
"""Of FedLALR, whose cost is measured; ε is not computed."""


def cost_job(name: str, device: str) -> tuple[nn.Module, fl.data.Population, fl.FedLALR, dict[str, Any]]:
    """Model, clients, method and options of a round in which as many clients as in a cohort take part."""
    if name == "paper":
        model, whole, algorithm, options = gpu_run.paper(gpu_run.images(None), device, gpu_run.Laps())
        cohort = options.pop("clients_per_round")
    else:
        problem = PROBLEMS[name]
        torch.manual_seed(0)
        model, whole, cohort = problem.model(), population(problem, tuning=False), problem.cohort
        algorithm, options = fl.FedLALR(lr=1e-3, eps=1e-2), {"local": fl.Steps(problem.steps)}
        options["batch_size"] = problem.batch
    some = whole.partition.offsets[: cohort + 1]
    part = fl.data.Partition(whole.partition.indices[: some[-1]], some)
    return model, fl.data.Population(whole.inputs, whole.targets, part, transform=whole.transform), algorithm, options


def cost(arguments: argparse.Namespace) -> None:
    """The median round of plain and private runs in turn."""
    clocks: dict[str, list[tuple[float, float]]] = {form: [] for form in FORMS}
    for form, privacy in itertools.chain.from_iterable([FORMS.items()] * 3):
        model, clients, algorithm, options = cost_job(arguments.problem, arguments.device)
        if privacy is not None:
            options |= {"privacy": privacy, "buffers": "local"}
        if form == "server":
            algorithm = replace(algorithm, momentum="restart")
        clock = Clock()
        rounds = arguments.rounds or 20
        fl.run(model, clients, algorithm, rounds=rounds, device=arguments.device, observers=[clock], **options)
        clocks[form] += clock.rounds()
    for place, kind in enumerate(("wall", "processor")):
        medians = {form: statistics.median(each[place] for each in times) for form, times in clocks.items()}
        for form, seconds in medians.items():
            print(json.dumps({"form": form, kind: seconds, "more": seconds / medians["plain"] - 1}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for command in (solve, tune, final, cost):
        one = commands.add_parser(command.__name__)
        one.set_defaults(command=command)
        one.add_argument("problem", choices=[*PROBLEMS, "paper"] if command is cost else PROBLEMS)
        one.add_argument("--rounds", type=int)
        one.add_argument("--device", default="auto")
        if command in (tune, final):
            one.add_argument("--noise", type=float, required=True)
            one.add_argument("--limit", type=float, default=math.inf, help="seconds after which no run is started")
            one.add_argument("--processes", type=int, default=1, help="runs side by side")
            one.add_argument("--methods", nargs="+", choices=GRIDS["digits"])
            one.add_argument("--dtype", help="such as bfloat16")
            one.add_argument("--into", type=Path, required=True, help="the file of results, one JSON object a line")
        if command is final:
            one.add_argument("--tuned", type=Path, required=True)
            one.add_argument("--seeds", type=int, default=5)
        if command is solve:
            one.add_argument("--epsilon", type=float, default=8.0)
            one.add_argument("--delta", type=float, default=1e-4)
    shown = commands.add_parser("table")
    shown.add_argument("files", nargs="+", type=Path)
    shown.set_defaults(command=table)
    arguments = parser.parse_args(namespace=argparse.Namespace(began=time.time()))
    arguments.command(arguments)


if __name__ == "__main__":
    sys.exit(main())
