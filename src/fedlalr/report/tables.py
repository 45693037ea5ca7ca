"""Tables for terminals and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedlalr.algorithms.registry import ALGORITHMS
from fedlalr.config import Config
from fedlalr.config.grid import on_default_rates
from fedlalr.report.comparison import Comparison, MethodOutcome
from fedlalr.report.statistics import ConfidenceInterval, MeanAndDeviation, spread

NAMES = {name: getattr(method, "__name__", name) for name, method in ALGORITHMS.items()} | {
    "fedamsv1": "FedAMSv1",
    "fedamsv2": "FedAMSv2",
    "adaalter": "Local AdaAlter",
    "sharedamsgrad": "shared-v̂ AMSGrad",
    "localadam": "local Adam",
    "deltasgd": "Δ-SGD",
}
"""Methods as written in papers."""
DATA_NAMES = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fashion": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "shakespeare": "Shakespeare",
}
"""Data sets in titles."""
ENOUGH_SEEDS = 3
"""With fewer, Student's interval is so wide that it includes zero for almost any difference."""


@dataclass(frozen=True)
class Table:
    """Cells of text under a heading; the first column is left-aligned, the others right-aligned."""

    heading: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def with_notes(self, notes: Iterable[str]) -> Table:
        return replace(self, notes=(*self.notes, *notes))

    def markdown(self) -> str:
        """The table in Markdown, with its notes below."""
        rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(self.heading))) + "|"
        lines = [_line(self.heading), rule, *(_line(row) for row in self.rows)]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)]) + "\n"


def comparison_table(comparison: Comparison) -> Table:
    """Final accuracy with its difference to the best, and rounds, megabytes and seconds to the target and in total."""
    assert comparison.target is not None, "methods without an accuracy are compared by `losses_table`"
    target = f"{100 * comparison.target:.4g}%"  # all digits of 12.5 %: 12 % would be another target
    heading = (
        "method",
        "final accuracy, %",
        "difference to best [95 %]",
        f"rounds to {target}",
        f"MB to {target}",
        f"seconds to {target}",
        "MB sent",
        "seconds",
    )
    digits = 1 if max(outcome.seconds.mean for outcome in comparison.outcomes) >= 10 else 2
    small = max(outcome.megabytes.mean for outcome in comparison.outcomes) < 1
    rows = tuple(_row(outcome, digits, 4 if small else 1) for outcome in comparison.outcomes)
    return Table(heading, rows, tuple(notes_of(comparison)))


def name_of(method: str) -> str:
    """A method as written in papers, with its compression if it has one."""
    method, plus, compression = method.partition("+")
    return NAMES.get(method, method) + (f" ({compression})" if plus else "")


def _row(outcome: MethodOutcome, digits: int, of_megabytes: int) -> tuple[str, ...]:
    """The cells of a method, with seconds and megabytes to a number of digits."""
    return (
        name_of(outcome.method),
        _plus_minus(outcome.final, 100, 1) if outcome.final else "failed",
        in_words(outcome.to_best, lambda share: f"{100 * share:+.1f}"),
        _reached(outcome.rounds_to_target, 0),
        _reached(outcome.megabytes_to_target, of_megabytes),
        _reached(outcome.seconds_to_target, digits),
        f"{outcome.megabytes.mean:.{of_megabytes}f}",
        _plus_minus(outcome.seconds, 1, digits),
    )


_ON = {
    "held-out": "the mean over the clients' held-out samples",
    "training": "the clients' training loss in the last round",
}
"""What stands in for the test set."""


def notes_of(comparison: Comparison) -> Iterable[str]:
    """What the table shows, and how to read it."""
    seeds = comparison.seeds
    samples, _, what = comparison.measure.rpartition(" ")
    if samples in _ON:
        yield f"Without a test set, the {what} is {_ON[samples]}."
    if seeds > 1:
        yield (
            f"± is the standard deviation over {seeds} seeds. Differences are paired by seed (same data, start and "
            f"cohorts), with Student's 95 % interval, not adjusted for multiple comparisons."
        )
        ties = [name_of(o.method) for o in comparison.outcomes if o.to_best is not None and not o.to_best.excludes_zero]
        best = name_of(comparison.best.method)
        if ties and seeds < ENOUGH_SEEDS:
            few = f"{seeds} seeds are too few to tell {', '.join(ties)} from {best}"
            yield f"{few}; use --seeds {ENOUGH_SEEDS} or more."
        elif ties:
            yield f"Indistinguishable from {best} with {seeds} seeds: {', '.join(ties)}."
        level = [name_of(o.method) for o in comparison.outcomes if o.to_best is not None and o.to_best.low is None]
        if level:
            yield f"The same difference for all seeds, so no spread for an interval: {', '.join(level)}."
    else:
        yield "One seed: there is no spread to judge differences by; use --seeds."
    if any(0 < o.reached < seeds for o in comparison.outcomes):
        yield f"(k/{seeds}) means that only k of {seeds} seeds reached the target; the mean is over those."
    failures = ((name_of(o.method), failure) for o in comparison.outcomes for failure in o.failures if failure)
    for names, failure in alike(failures):
        runs = f" in {len(names)} runs" if len(names) > 1 else ""
        yield f"{', '.join(dict.fromkeys(names))} failed{runs}: {failure}"


def default_rates_notes(rows: Mapping[str, Config]) -> list[str]:
    """A note that names those of several rows that have default learning rates."""
    names = [label for label, config in rows.items() if on_default_rates(config)]
    if not names or len(rows) == 1:
        return []
    use = "uses" if len(names) == 1 else "use"
    return [f"{', '.join(names)} {use} default learning rates, not chosen for this problem; --grid tunes all methods."]


def _plus_minus(value: MeanAndDeviation, scale: float, digits: int) -> str:
    mean = f"{value.mean * scale:.{digits}f}"
    return mean if value.deviation is None else f"{mean} ± {value.deviation * scale:.{digits}f}"


def in_words(value: ConfidenceInterval | None, number: Callable[[float], str]) -> str:
    """A difference with its interval, if there is one."""
    if value is None:
        return "–"
    if value.low is None or value.high is None:
        return number(value.mean)
    return f"{number(value.mean)} [{number(value.low)}, {number(value.high)}]"


def _reached(values: Sequence[float | None], digits: int) -> str:
    reached = [value for value in values if value is not None]
    if not reached:
        return "not reached"
    share = f" ({len(reached)}/{len(values)})" if len(reached) < len(values) else ""
    return _plus_minus(spread(reached), 1, digits) + share


def counted(count: int, what: str) -> str:
    """
    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{count} {what}{'' if count == 1 else 's'}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def alike(failures: Iterable[tuple[str, str]]) -> list[tuple[list[str], str]]:
    """Group runs by their failure: the names, one for each run, and the failure as text.

    >>> alike([("a", "1 client (7): NaN"), ("b", "1 client (3): NaN"), ("c", "disk full")])
    [(['a', 'b'], '1 client: NaN'), (['c'], 'disk full')]
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, failure in failures:
        groups.setdefault(kind(failure), []).append((name, failure))
    return [
        ([name for name, _ in group], group[0][1] if len({failure for _, failure in group}) == 1 else what)
        for what, group in groups.items()
    ]


def kind(failure: str) -> str:
    """A failure without the client numbers in it, which differ between runs with the same cause.

    >>> kind("Rejected: client 3: x is not finite")
    'Rejected: a client: x is not finite'
    """
    return re.sub(r"\bclient \d+", "a client", re.sub(r" \(\d[\d, …]*\)", "", failure))
