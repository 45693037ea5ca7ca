"""The tables of a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from fedlalr.federation import Record
from fedlalr.federation.record import Samples, judged_losses, judged_on
from fedlalr.federation.replies.screening import SEVERAL
from fedlalr.report.comparison import MEGABYTE, Curve, compare
from fedlalr.report.groups import Group, differing, metrics_of
from fedlalr.report.losses import losses_table
from fedlalr.report.runs import ReportedRun
from fedlalr.report.tables import Table, comparison_table, default_rates_notes

MOST_ROWS = 100
PARTS = {
    "train": "local training",
    "screen": "screening of replies",
    "reduce": "reduction and server update",
    "evaluate": "evaluation",
    "checkpoint": "checkpoint",
}
REST = "the rest"


def runs_table(groups: Sequence[Group]) -> Table:
    """One row per run."""
    own = metrics_of(groups)
    every = {judged_on(run.records) for group in groups for run in group.runs if run.records}
    judged = [samples for samples in get_args(Samples) if samples in every]
    quality = ("accuracy", "best", *(f"{samples} loss" for samples in judged), *own)
    private = any(record.epsilon is not None for group in groups for record in group.records)
    quality += ("epsilon",) if private else ()
    heading = ("run", "seed", "rounds", *quality, "MB up", "MB down", "seconds", "clipped", "rejected", "state")
    rows = tuple(_run_row(group.label, run, judged, own, private) for group in groups for run in group.runs)
    failures = tuple(f"{group.label}: {run.failure}" for group in groups for run in group.runs if run.failure)
    return Table(heading, rows, failures)


def _run_row(
    label: str, run: ReportedRun, judged: Sequence[Samples], own: Sequence[str], private: bool
) -> tuple[str, ...]:
    records = run.records
    losses = [loss for loss in judged_losses(records) if loss is not None]
    metrics = records[-1].metrics if records else {}
    accuracies = [record.accuracy for record in records if record.accuracy is not None]
    planned = f"/{run.config.rounds}" if run.config and len(records) != run.config.rounds else ""
    return (
        label,
        run.seed_text,
        f"{len(records)}{planned}",
        f"{accuracies[-1]:.1%}" if accuracies else "–",
        f"{max(accuracies):.1%}" if accuracies else "–",
        *(f"{losses[-1]:.4g}" if losses and samples == judged_on(records) else "–" for samples in judged),
        *(f"{metrics[name]:.4g}" if name in metrics else "–" for name in own),
        *([_epsilon(records)] if private else []),
        _megabytes(sum(record.bytes_up for record in records)),
        _megabytes(sum(record.bytes_down for record in records)),
        f"{sum(record.seconds for record in records):.1f}",
        str(sum(len(record.clipped) for record in records)),
        str(len(run.rejections)),
        run.state,
    )


def _epsilon(records: Sequence[Record]) -> str:
    return "–" if not records or records[-1].epsilon is None else f"{records[-1].epsilon:.3g}"


def _megabytes(sent: int) -> str:
    """
    >>> _megabytes(12_345_678), _megabytes(4_321), _megabytes(0)
    ('12.3', '0.0043', '0')
    """
    return f"{sent / MEGABYTE:.1f}" if sent >= MEGABYTE / 10 else f"{sent / MEGABYTE:.2g}"


def comparison_section(groups: Sequence[Group]) -> Table | None:
    """Compare groups by accuracy or, without one, by loss; None unless there are several groups with the same data and
    seeds, whose runs are equally long or failed."""
    if any(name.startswith(("data", "partition", "test")) for name in differing([group.settings for group in groups])):
        return None
    seeds = {tuple(run.seed for run in group.runs) for group in groups}
    runs = [run for group in groups for run in group.runs if run.records]
    lengths = {len(run.records) for group in groups for run in group.runs if not run.failure}
    if len(groups) < 2 or len(seeds) != 1 or len(lengths) > 1 or not runs:
        return None
    notes = default_rates_notes({group.label: config for group in groups if (config := group.runs[0].config)})
    if len({judged_on(run.records) for run in runs}) > 1:
        return None
    targets = {run.config.target if run.config else None for group in groups for run in group.runs}
    curves = {group.label: [Curve(run.records, run.failure) for run in group.runs] for group in groups}
    target = targets.pop() if len(targets) == 1 else None
    comparison = compare(curves, {label: {} for label in curves}, target)
    if comparison.target is None:
        return None if len(set(map(_loss_of, groups))) > 1 else losses_table(comparison).with_notes(notes)
    if any(Curve(run.records).final is None for run in runs):
        return None
    return comparison_table(comparison).with_notes(notes)


def _loss_of(group: Group) -> str:
    """The loss function: values of different losses are not compared."""
    return json.dumps([value for name, value in group.settings.items() if name.partition(".")[0] == "loss"])


def settings_table(groups: Sequence[Group]) -> Table:
    """The settings that differ between groups, or all settings of a single group."""
    if len(groups) == 1:
        return shared_table(groups)
    names = differing([group.settings for group in groups])
    rows = tuple((name, *(shown(group.settings.get(name, "–")) for group in groups)) for name in names)
    return Table(("setting", *(group.label for group in groups)), rows)


def shared_table(groups: Sequence[Group]) -> Table:
    """The settings that all groups share."""
    apart = set(differing([group.settings for group in groups]))
    return Table(
        ("setting", "value"),
        tuple((name, shown(value)) for name, value in groups[0].settings.items() if name not in apart),
    )


def rejections_table(groups: Sequence[Group]) -> Table | None:
    """The clients whose replies were rejected, most often rejected first; None if there are none.

    The notes name those that were rejected in several of their rounds in a row.
    """
    rejected: dict[tuple[str, str, int], list[tuple[int, str]]] = {}
    repeatedly: dict[tuple[str, str, int], None] = {}
    for group in groups:
        for run in group.runs:
            for round, (client, reason) in run.rejections:
                rejected.setdefault((group.label, run.seed_text, client), []).append((round, reason))
            for client in (client for record in run.records for client in record.repeatedly):
                repeatedly[group.label, run.seed_text, client] = None
    if not rejected:
        return None
    rows = tuple(
        (label, seed, str(client), each[-1][1], str(len(each)), _some([round for round, _ in each]))
        for (label, seed, client), each in sorted(rejected.items(), key=lambda item: -len(item[1]))[:MOST_ROWS]
    )
    more = len(rejected) - len(rows)
    notes = [f"Replies of {more} more clients were rejected; metrics.jsonl lists all."] if more else []
    if repeatedly:
        named = ", ".join(f"client {client} of {run} (seed {seed})" for run, seed, client in [*repeatedly][:MOST_ROWS])
        notes.append(
            f"Rejected in {SEVERAL} or more of their rounds running, so the model does not learn from them: {named}."
        )
    return Table(("run", "seed", "client", "last reason", "times", "in rounds"), rows, tuple(notes))


def timing_table(groups: Sequence[Group]) -> Table:
    """How the time of a run was spent, on average over the seeds."""
    recorded = {name for group in groups for record in group.records for name in record.timing}
    names = [*(name for name in PARTS if name in recorded), *sorted(recorded - set(PARTS))]
    shares = [_shares(group, names) for group in groups]
    labels = [*(PARTS.get(name, name) for name in names), REST]
    rows = [(label, *(share[i] for share in shares)) for i, label in enumerate(labels)]
    totals = [sum(record.seconds for record in group.records) for group in groups]
    timed = list(zip(groups, totals, strict=True))
    rows.append(("seconds per round", *(f"{total / max(1, len(group.records)):.3g}" for group, total in timed)))
    rows.append(("seconds per run", *(f"{total / len(group.runs):.1f}" for group, total in timed)))
    return Table(("part", *(group.label for group in groups)), tuple(rows))


def _shares(group: Group, names: Sequence[str]) -> list[str]:
    """The parts of a group's time, and the rest."""
    total = sum(record.seconds for record in group.records)
    parts = [sum(record.timing.get(name, 0.0) for record in group.records) for name in names]
    return [f"{part / total:.1%}" if total else "–" for part in [*parts, max(0.0, total - sum(parts))]]


def _some(rounds: Sequence[int], most: int = 8) -> str:
    """
    >>> _some([1, 2, 3], most=2)
    '1, 2, … (3 in total)'
    """
    shown = ", ".join(map(str, rounds[:most]))
    return shown if len(rounds) <= most else f"{shown}, … ({len(rounds)} in total)"


def shown(value: Any) -> str:
    """A setting as a person writes it.

    >>> shown(None), shown("dirichlet"), shown([0.9, 0.99])
    ('none', 'dirichlet', '[0.9, 0.99]')
    """
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
