"""How the time of a round grows: `python benchmarks/scaling.py`. Cohort, local steps, size of the network.

One network at a time is changed in one way, on every engine and with FedAvg and FedLALR in turn, so that the plot shows
what an engine gains and what the adaptive step costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedlalr as fl
from fedlalr.benchmark.results import machine
from fedlalr.data.population import as_clients
from fedlalr.federation.round import Rules, run_round
from fedlalr.federation.session import initial_state
from fedlalr.training import Engine, Training
from fedlalr.training.engines.registry import create_engine
from fedlalr.training.layout import Layout

ENGINES = ("reference", "stacked", "workers")
COLOURS = dict(zip(ENGINES, ("#8c8c8c", "#5e2ca5", "#b58ce6"), strict=True))
"""Of no method: an engine is none."""
METHODS = {"fedavg": fl.FedAvg(lr=0.05), "fedlalr": fl.FedLALR()}


@dataclass(frozen=True)
class Point:
    """A job with one thing changed."""

    cohort: int = 10
    steps: int = 10
    width: int = 64
    """Of the hidden layer of a perceptron on 784 inputs."""


SWEEPS = {
    "cohort": [Point(cohort=cohort) for cohort in (1, 2, 5, 10, 20, 50, 100)],
    "steps": [Point(steps=steps) for steps in (1, 3, 10, 30, 100)],
    "width": [Point(width=width) for width in (8, 32, 128, 512)],
}
LABELS = {"cohort": "clients a round", "steps": "local steps", "width": "parameters"}


def make_training(point: Point, method: str) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, point.width), nn.ReLU(), nn.Linear(point.width, 10))
    clients = [(torch.randn(60, 784), torch.randint(0, 10, (60,))) for _ in range(100)]
    return Training(
        model=model,
        layout=Layout.of(model),
        clients=as_clients(clients),
        algorithm=METHODS[method],
        loss=nn.functional.cross_entropy,
        local=fl.Steps(point.steps),
        batch_size=10,
        device=torch.device("cpu"),
    )


@contextmanager
def started(engine: str, point: Point, method: str) -> Iterator[tuple[Engine, Training]]:
    training = make_training(point, method)
    chosen, _ = create_engine(engine, training, point.cohort)
    try:
        yield chosen, training
    finally:
        chosen.close()


def seconds(engine: str, point: Point, rounds: int) -> dict[str, float]:
    """The median time of a round by method; the methods take turns."""
    with started(engine, point, "fedavg") as average, started(engine, point, "fedlalr") as adaptive:
        running = {"fedavg": average, "fedlalr": adaptive}
        states = {method: initial_state(training) for method, (_, training) in running.items()}
        found: dict[str, list[float]] = {method: [] for method in running}
        for turn in range(rounds + 2):
            for method, (chosen, training) in running.items():
                cohort = torch.arange(point.cohort) + turn % (101 - point.cohort)
                began = time.perf_counter()
                states[method] = run_round(states[method], cohort, 0.01, chosen, training, Rules()).state
                if turn >= 2:
                    found[method].append(time.perf_counter() - began)
    return {method: statistics.median(mine) for method, mine in found.items()}


def plot(results: list[dict[str, Any]], file: Path) -> None:
    """A panel for each thing that grows, named after the fastest engine, and a line for each engine and method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(SWEEPS), figsize=(11, 3.65), sharey=True)
    for panel, sweep in zip(panels, SWEEPS, strict=True):
        for engine in ENGINES:
            mine = [row for row in results if row["sweep"] == sweep and row["engine"] == engine]
            places = [row["parameters"] if sweep == "width" else row[sweep] for row in mine]
            panel.plot(places, [row["fedlalr"] for row in mine], color=COLOURS[engine], marker="o", label=engine)
            panel.plot(places, [row["fedavg"] for row in mine], color=COLOURS[engine], linestyle=":", marker=".")
        panel.set(xscale="log", yscale="log", xlabel=LABELS[sweep])
        engine, share = fastest([row for row in results if row["sweep"] == sweep])
        panel.set_title(f"fastest{share}: {engine}", fontsize=10, color=COLOURS[engine])
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds a round\n(solid FedLALR, dotted FedAvg)")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=160)


def fastest(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """The engine that is the fastest with most jobs and methods, and with how many of them if not with all."""
    times: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        for method in METHODS:
            times.setdefault((row["cohort"], row["steps"], row["width"], method), {})[row["engine"]] = row[method]
    won = Counter(min(each, key=lambda engine: each[engine]) for each in times.values())
    engine, count = won.most_common(1)[0]
    return engine, "" if count == len(times) else f" in {count} of {len(times)} points"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a round as cohort, local steps and network grow.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/scaling"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    print("| grows | engine | clients | steps | parameters | FedAvg ms | FedLALR ms | FedLALR × FedAvg |")
    print("|---|---|---|---|---|---|---|---|")
    for sweep, points in SWEEPS.items():
        for engine in ENGINES:
            for point in points:
                found = seconds(engine, point, options.rounds)
                parameters = (784 + 1) * point.width + (point.width + 1) * 10
                results.append({"sweep": sweep, "engine": engine, "parameters": parameters, **asdict(point), **found})
                average, adaptive = found["fedavg"], found["fedlalr"]
                print(
                    f"| {sweep} | {engine} | {point.cohort} | {point.steps} | {parameters:,} | {average * 1e3:.1f} | "
                    f"{adaptive * 1e3:.1f} | {adaptive / average:.2f} |",
                    flush=True,
                )
    (options.out / "scaling.json").write_text(json.dumps({"machine": machine(), "results": results}, indent=1))
    plot(results, options.out / "scaling.png")


if __name__ == "__main__":
    main()
