"""Comparison of methods without an accuracy: their final loss."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedlalr.report.comparison import Curve, totals
from fedlalr.report.groups import Group
from fedlalr.report.statistics import ConfidenceInterval, paired_difference, spread
from fedlalr.report.tables import Table, in_words


def losses_table(groups: Sequence[Group]) -> Table:
    """The final loss of each group over its seeds, lowest first, with the difference to the lowest."""
    finals = {group.label: [(Curve(run.records).losses or [math.nan])[-1] for run in group.runs] for group in groups}
    order = sorted(groups, key=lambda group: _mean(finals[group.label]))
    best = finals[order[0].label]
    differences = [_difference(finals[group.label], best) for group in order[1:]]
    rows = [_row(group, finals[group.label], to) for group, to in zip(order, [None, *differences], strict=True)]
    heading = ("method", "final loss", "difference to lowest [95 %]", "MB sent", "seconds")
    return Table(heading, tuple(rows), tuple(_notes(order, differences)))


def _mean(finals: Sequence[float]) -> float:
    """Non-finite losses come last."""
    mean = spread(finals).mean
    return mean if math.isfinite(mean) else math.inf


def _difference(mine: Sequence[float], best: Sequence[float]) -> ConfidenceInterval | None:
    return paired_difference(mine, best) if all(map(math.isfinite, (*mine, *best))) else None


def _row(group: Group, finals: Sequence[float], to_best: ConfidenceInterval | None) -> tuple[str, ...]:
    megabytes, seconds = (total.mean for total in totals([Curve(run.records) for run in group.runs]))
    loss, deviation = spread(finals)
    shown = f"{loss:.4g}" if deviation is None else f"{loss:.4g} ± {deviation:.2g}"
    return (group.label, shown, in_words(to_best, lambda loss: f"{loss:+.3g}"), f"{megabytes:.3g}", f"{seconds:.3g}")


def _notes(order: Sequence[Group], differences: Sequence[ConfidenceInterval | None]) -> list[str]:
    seeds = len(order[0].runs)
    notes = []
    if all(record.loss == record.train_loss for group in order for record in group.records):
        held_out = any(record.per_client for group in order for record in group.records)
        on = "mean over the clients' held-out samples" if held_out else "training loss of the clients in the last round"
        notes.append(f"Without a test set this is the {on}.")
    if seeds == 1:
        return [*notes, "One seed: there is no spread to judge differences by."]
    notes.append(
        f"± is the standard deviation over {seeds} seeds. Differences are paired by seed, with Student's 95 % "
        f"interval, not adjusted for multiple comparisons."
    )
    pairs = zip(order[1:], differences, strict=True)
    ties = [group.label for group, to in pairs if to is not None and not to.excludes_zero]
    return (
        [*notes, f"Indistinguishable from {order[0].label} with {seeds} seeds: {'; '.join(ties)}."] if ties else notes
    )
