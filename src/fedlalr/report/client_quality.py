"""The quality over the clients, each evaluated on its own samples: a table, and curves with the spread as a band."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedlalr.report.groups import Group, plain
from fedlalr.report.runs import ReportedRun
from fedlalr.report.tables import Table

QUANTITIES = {"accuracy": "{:.1%}", "loss": "{:.4g}"}
"""What is evaluated, and how it is written."""


def clients_table(groups: Sequence[Group]) -> Table | None:
    """The last evaluation of the clients of every run; None if no run has one."""
    rows = [row for group in groups for run in group.runs if (row := _row(group.label, run)) is not None]
    if not rows:
        return None
    each = ("mean", "standard deviation", "worst 10 %")
    heading = ("run", "seed", "round", "clients", *(f"{name}, {part}" for name in QUANTITIES for part in each))
    note = "Every client's model on samples of its own. Worst 10 %: the mean over that share of the clients."
    return Table(heading, tuple(rows), (note,))


def _row(label: str, run: ReportedRun) -> tuple[str, ...] | None:
    last = next((record for record in reversed(run.records) if record.per_client), None)
    if last is None:
        return None
    cells: list[str] = []
    for name, form in QUANTITIES.items():
        found = last.per_client.get(name)
        cells += [form.format(value) for value in found[:3]] if found else ["–"] * 3
    clients = next(iter(last.per_client.values())).clients
    return (label, run.seed_text, str(last.round), str(clients), *cells)


def clients_of(group: Group) -> dict[str, Any] | None:
    """The curves of a group's clients; None if they were not evaluated."""
    found = {name: curve for name in QUANTITIES if (curve := _curve(group, name)) is not None}
    return {"label": group.label, "y": found} if found else None


def _curve(group: Group, name: str) -> dict[str, list[float | None]] | None:
    """Means over the seeds, in the rounds after which every run evaluated its clients. The band is the spread."""
    each = [
        {record.round: record.per_client[name] for record in run.records if name in record.per_client}
        for run in group.runs
    ]
    rounds = sorted(set.intersection(*map(set, each)))
    if not rounds:
        return None
    mean, spread, worst = np.array([[one[round][:3] for round in rounds] for one in each]).mean(axis=0).T
    low, high = mean - spread, mean + spread
    if name == "accuracy":
        low, high = np.maximum(low, 0), np.minimum(high, 1)
    drawn = {"x": rounds, "mean": mean, "low": low, "high": high, "worst": worst}
    return {part: plain(values) for part, values in drawn.items()}
