"""Results of races: tables, a plot, and all numbers as JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fedlalr import __version__
from fedlalr.algorithms import ALGORITHMS
from fedlalr.benchmark.racing import RaceResult
from fedlalr.common.colours import COLOURS, GREY
from fedlalr.training.machine import hardware, usable_cores

Races = Mapping[str, Sequence[RaceResult]]
"""The results by job; the first contestant of each is the baseline."""


def table(races: Races) -> str:
    """A Markdown table: time per round relative to the first contestant, CPU time in brackets."""
    names = {outcome.name: None for outcomes in races.values() for outcome in outcomes}
    found = {(job, outcome.name): outcome for job, outcomes in races.items() for outcome in outcomes}
    lines = [
        f"| | {' | '.join(f'{job}, × {outcomes[0].name}' for job, outcomes in races.items())} | start-up s | MB |",
        "|---" * (len(races) + 3) + "|",
    ]
    for name in names:
        mine = [found[job, name] for job in races if (job, name) in found]
        cells = [_cell(found.get((job, name)), outcomes[0]) for job, outcomes in races.items()]
        startup = statistics.median(outcome.startup for outcome in mine)
        memory = max(outcome.memory for outcome in mine) / 1e6
        lines.append(f"| {name} | {' | '.join(cells)} | {startup:.1f} | {memory:,.0f} |")
    return "\n".join(lines)


def method_table(races: Races) -> str:
    """A Markdown table: time per round of each other method relative to FedAvg on the same engine; may be empty."""
    rows = []
    for job, outcomes in races.items():
        named = {outcome.name: outcome for outcome in outcomes}
        for outcome in outcomes:
            base, _, method = outcome.name.rpartition(", ")
            if method in ALGORITHMS and base in named:
                rows.append(f"| {job} | {base} | {method} | {_cell(outcome, named[base])} |")
    return "\n".join(["| job | engine | method | × FedAvg |", "|---|---|---|---|", *rows]) if rows else ""


def _cell(outcome: RaceResult | None, base: RaceResult) -> str:
    if outcome is None:
        return "–"
    if outcome is base:
        return f"1 ({base.median:.3g} s)"
    ratio, processor = outcome.ratio(base), outcome.processor_ratio(base)
    cell = f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"
    return cell if processor is None else f"{cell} ({processor:.2f})"


def as_dict(races: Races, device: str = "cpu") -> dict[str, Any]:
    """All measurements, and the machine they were made on."""
    return {
        "machine": machine(device),
        "races": {job: [asdict(outcome) for outcome in outcomes] for job, outcomes in races.items()},
        "ratios": {job: {one.name: one.ratio(every[0]) for one in every} for job, every in races.items()},
    }


def report(races: Races, threads: int = 1, device: str = "cpu") -> str:
    """The tables, and the machine and versions."""
    where = machine(device)
    load = f", load {where['load']:.1f}" if where["load"] is not None else ""
    count = "one thread" if threads == 1 else f"{threads} threads"
    line = (
        f"{where['gpu'] + ', ' if where['gpu'] else ''}{where['processor']}, {where['cores']} cores, "
        f"{count} per process, Python {where['python']}, "
        f"torch {where['torch']}, fedlalr {where['fedlalr']}{load}"
    )
    return "\n\n".join(filter(None, [table(races), method_table(races), line]))


def machine(device: str = "cpu") -> dict[str, Any]:
    """The machine and versions."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "gpu": hardware(device) if device != "cpu" else None,
        "processor": hardware("cpu"),
        "cores": usable_cores(),
        "load": load,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "fedlalr": __version__,
    }


def plot_races(races: Races, file: Path) -> None:
    """Bars of the time relative to the first contestant, one panel per job; lower is better."""
    from matplotlib.figure import Figure  # a slow import, needed only here

    figure = Figure(figsize=(3.6 * len(races) + 1, 3.2))
    panels = figure.subplots(1, len(races), squeeze=False)
    for panel, (job, outcomes) in zip(panels[0], races.items(), strict=True):
        names = [outcome.name for outcome in outcomes]
        ratios = [outcome.ratio(outcomes[0]) for outcome in outcomes]
        colours = [COLOURS[1] if name.startswith("fedlalr") else GREY for name in names]
        bars = panel.barh(names, ratios, color=colours)
        panel.bar_label(bars, fmt="%.2f", padding=3)
        panel.axvline(1, color="#555555", linewidth=0.8, linestyle=":")
        panel.set_xlim(0, max(ratios) * 1.2)
        panel.invert_yaxis()
        panel.set_title(job)
        panel.set_xlabel(f"time per round, × {names[0]}")
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160)
