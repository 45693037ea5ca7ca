"""The parts of a report that are tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fedlalr.report.comparison import MEGABYTE, Curve, compare
from fedlalr.report.groups import Group, differing
from fedlalr.report.runs import ReportedRun
from fedlalr.report.tables import Table, comparison_table

MOST_ROWS = 100
PARTS = {
    "train": "local training",
    "screen": "screening of replies",
    "reduce": "reduction and server update",
    "checkpoint": "checkpoint",
}
REST = "evaluation and the rest"


def runs_table(groups: Sequence[Group]) -> Table:
    """Every run in a row."""
    heading = ("run", "seed", "rounds", "accuracy", "best", "loss", "MB up", "MB down", "seconds", "refused", "state")
    rows = tuple(_run_row(group.label, run) for group in groups for run in group.runs)
    failures = tuple(f"{group.label}: {run.failure}" for group in groups for run in group.runs if run.failure)
    return Table(heading, rows, failures)


def _run_row(label: str, run: ReportedRun) -> tuple[str, ...]:
    records = run.records
    accuracies = [record.accuracy for record in records if record.accuracy is not None]
    planned = f"/{run.config.rounds}" if run.config and len(records) != run.config.rounds else ""
    return (
        label,
        "–" if run.seed is None else str(run.seed),
        f"{len(records)}{planned}",
        f"{accuracies[-1]:.1%}" if accuracies else "–",
        f"{max(accuracies):.1%}" if accuracies else "–",
        f"{records[-1].loss:.3f}" if records else "–",
        f"{sum(record.bytes_up + record.buffer_bytes_up for record in records) / MEGABYTE:.1f}",
        f"{sum(record.bytes_down + record.buffer_bytes_down for record in records) / MEGABYTE:.1f}",
        f"{sum(record.seconds for record in records):.1f}",
        str(sum(len(record.rejected) for record in records)),
        run.summary.get("status", "no summary"),
    )


def comparison_section(groups: Sequence[Group]) -> Table | None:
    """Groups against each other; None where there are not several of them, over the same seeds, with an accuracy."""
    seeds = {tuple(run.seed for run in group.runs) for group in groups}
    accuracies = [record.accuracy for group in groups for run in group.runs for record in run.records]
    if len(groups) < 2 or len(seeds) != 1 or not accuracies or None in accuracies:
        return None
    targets = {run.config.target if run.config else None for group in groups for run in group.runs}
    curves = {group.label: [Curve(run.records, run.failure) for run in group.runs] for group in groups}
    return comparison_table(
        compare(curves, {label: {} for label in curves}, targets.pop() if len(targets) == 1 else None)
    )


def settings_table(groups: Sequence[Group]) -> Table:
    """The settings that differ between groups, or all of them where there is one group."""
    if len(groups) == 1:
        return shared_table(groups)
    names = differing([group.settings for group in groups])
    rows = tuple((name, *(shown(group.settings.get(name, "–")) for group in groups)) for name in names)
    return Table(("setting", *(group.label for group in groups)), rows)


def shared_table(groups: Sequence[Group]) -> Table:
    """The settings that all groups have in common."""
    apart = set(differing([group.settings for group in groups]))
    return Table(
        ("setting", "value"),
        tuple((name, shown(value)) for name, value in groups[0].settings.items() if name not in apart),
    )


def rejections_table(groups: Sequence[Group]) -> Table | None:
    """The clients whose replies were refused, those refused most often first; None where there are none."""
    refused: Counter[tuple[str, str, int]] = Counter()
    rounds: dict[tuple[str, str, int], list[int]] = {}
    reasons: dict[tuple[str, str, int], str] = {}
    for group in groups:
        for run in group.runs:
            for record in run.records:
                for client, reason in record.rejected:
                    key = (group.label, "–" if run.seed is None else str(run.seed), client)
                    refused[key] += 1
                    rounds.setdefault(key, []).append(record.round)
                    reasons[key] = reason
    if not refused:
        return None
    rows = tuple(
        (key[0], key[1], str(key[2]), str(count), _some(rounds[key]), reasons[key])
        for key, count in refused.most_common(MOST_ROWS)
    )
    more = len(refused) - len(rows)
    notes = (f"{more} more clients were refused; metrics.jsonl names all.",) if more else ()
    return Table(("run", "seed", "client", "times", "in rounds", "last reason"), rows, notes)


def timing_table(groups: Sequence[Group]) -> Table:
    """Where the seconds of a run went, on average over the seeds."""
    names = [name for name in PARTS if any(name in r.timing for g in groups for run in g.runs for r in run.records)]
    others = {name for g in groups for run in g.runs for r in run.records for name in r.timing} - set(names)
    names += sorted(others)
    heading = ("run", *(PARTS.get(name, name) for name in names), REST, "total, s", "a round, s")
    return Table(heading, tuple(_timing_row(group, names) for group in groups))


def _timing_row(group: Group, names: Sequence[str]) -> tuple[str, ...]:
    records = [record for run in group.runs for record in run.records]
    total = sum(record.seconds for record in records)
    parts = [sum(record.timing.get(name, 0.0) for record in records) for name in names]
    shares = [f"{part / total:.1%}" if total else "–" for part in [*parts, max(0.0, total - sum(parts))]]
    each = total / len(records) if records else 0.0
    return (group.label, *shares, f"{total / len(group.runs):.1f}", f"{each:.3g}")


def _some(rounds: Sequence[int], most: int = 8) -> str:
    """
    >>> _some([1, 2, 3], most=2)
    '1, 2, … (3 in all)'
    """
    shown = ", ".join(map(str, rounds[:most]))
    return shown if len(rounds) <= most else f"{shown}, … ({len(rounds)} in all)"


def shown(value: Any) -> str:
    """A setting as a person writes it.

    >>> shown(None), shown("dirichlet"), shown([0.9, 0.99])
    ('none', 'dirichlet', '[0.9, 0.99]')
    """
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
