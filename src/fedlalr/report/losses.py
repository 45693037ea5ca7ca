"""Comparison of methods without an accuracy, as a table."""

from __future__ import annotations

from fedlalr.report.comparison import Comparison, MethodOutcome
from fedlalr.report.tables import Table, in_words, name_of, notes_of


def losses_table(comparison: Comparison) -> Table:
    """The final loss of each method over its seeds, lowest first, with the difference to the lowest."""
    heading = ("method", f"final {comparison.measure}", "difference to lowest [95 %]", "MB sent", "seconds")
    return Table(heading, tuple(map(_row, comparison.outcomes)), tuple(notes_of(comparison)))


def _row(outcome: MethodOutcome) -> tuple[str, ...]:
    to_best = in_words(outcome.to_best, lambda loss: f"{loss:+.3g}")
    sent, seconds = f"{outcome.megabytes.mean:.3g}", f"{outcome.seconds.mean:.3g}"
    return (name_of(outcome.method), _final(outcome), to_best, sent, seconds)


def _final(outcome: MethodOutcome) -> str:
    if outcome.final is None or None in outcome.finals:
        return "failed" if any(outcome.failures) else "not finite"
    loss, deviation = outcome.final
    return f"{loss:.4g}" if deviation is None else f"{loss:.4g} ± {deviation:.2g}"
