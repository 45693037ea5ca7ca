"""Statements that compare curves of a panel: how each is decided, and what was measured, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.paper.curve_measures import FALL, FINAL, Gap, Quantity, gap, mean_of, shared_seeds
from fedlalr.paper.curves import PanelCurves
from fedlalr.paper.verdicts import MARKED_DROP, Check, Outcome, conjunction


def above(
    result: PanelCurves,
    quantity: Quantity,
    key: str,
    rivals: Sequence[str],
    reading: str,
    *,
    lower: bool = False,
    window: str = "",
    beside: Sequence[PanelCurves] = (),
) -> Check:
    """Whether one curve is above (or below) every rival, by the mean over this panel and those beside it."""
    whom = " and ".join(name_in(result, rival) for rival in rivals)
    if len(rivals) > 2:
        whom = "every other method" if len(rivals) == len(PAPER_METHODS) - 1 else "the other baselines"
    mine = name_in(result, key)
    statement = f"{mine}: {quantity.name} {'below' if lower else 'above'} that of {whom}"
    where = _where(result, beside)
    gaps = _gaps(result, quantity, key, rivals, beside)
    if isinstance(gaps, str):
        return Check(statement, where, gaps, "not measured", reading=reading, window=window)
    outcomes = {rival: one.on_side(lower) for rival, one in gaps.items()}
    outcome = conjunction(list(outcomes.values()))
    deciding = [rival for rival in gaps if outcomes[rival] == outcome]
    closest = min(deciding, key=lambda rival: gaps[rival].mean * (-1 if lower else 1))
    one, other = gaps[closest], name_in(result, closest)
    measured, number = described(mine, other, one, quantity, lower), short(mine, other, one, quantity)
    return Check(statement, where, measured, outcome, one.seeds, reading, window, number)


def like(
    result: PanelCurves,
    quantity: Quantity,
    key: str,
    other: str,
    reading: str,
    *,
    limits: tuple[float, float] | None = None,
    against: PanelCurves | None = None,
) -> Check:
    """Whether two curves, perhaps of two panels, end alike, or differ by an amount within given limits."""
    against = against or result
    mine, theirs = name_in(result, key), name_in(against, other)
    if against is not result:
        mine, theirs = f"{mine}, {result.panel.short}", against.panel.short
    low, high = limits or (-quantity.alike, quantity.alike)
    how = f"at most {high * quantity.scale:g}{quantity.step} {'from' if low < 0 else 'above'}"
    statement = f"{mine}: {quantity.name} {how} that of {theirs}"
    missing = _missing(result, [key, other] if against is result else [key]) or _missing(against, [other])
    one = None if missing else gap(quantity.measure, [result.lines[key]], [against.lines[other]])
    if one is None:
        told = missing or f"no seed with both {mine} and {theirs}"
        return Check(statement, result.panel.title, told, "not measured", reading=reading)
    measured = described(mine, theirs, one, quantity)
    number = short(mine, theirs, one, quantity)
    return Check(statement, result.panel.title, measured, one.between(low, high), one.seeds, reading, number=number)


NUMBERS = {2: "two", 3: "three"}


def above_most(
    result: PanelCurves,
    quantity: Quantity,
    key: str,
    cast: Sequence[str],
    reading: str,
    *,
    least: int = 3,
    lower: bool = False,
) -> Check:
    """Whether a curve is above (or below) at least some number of the five others; with three, in the top half."""
    word, mine = "below" if lower else "above", name_in(result, key)
    statement = f"{mine}: {quantity.name} {word} that of at least {NUMBERS[least]} of the five others"
    gaps = _gaps(result, quantity, key, [other for other in cast if other != key])
    if isinstance(gaps, str):
        return Check(statement, result.panel.title, gaps, "not measured", reading=reading)
    outcomes = [one.on_side(lower) for one in gaps.values()]
    sure, possible = outcomes.count("holds"), len(outcomes) - outcomes.count("does not hold")
    outcome: Outcome = "holds" if sure >= least else "does not hold" if possible < least else "undecided"
    first = next(iter(gaps.values()))
    measured = f"{quantity.text(float(first.first.mean()))}, {word} {sure} of {len(gaps)}"
    seeds = tuple(seed for seed in first.seeds if all(seed in one.seeds for one in gaps.values()))
    return Check(statement, result.panel.title, measured, outcome, seeds, reading)


def drops(result: PanelCurves, key: str, reading: str, *, beside: Sequence[PanelCurves] = ()) -> Check:
    """Whether a curve drops markedly, by the mean over this panel and those beside it."""
    statement, where = f"{name_in(result, key)}: a marked drop", _where(result, beside)
    if missing := _missing(result, [key], beside):
        return Check(statement, where, missing, "not measured", reading=reading)
    lines = [panel.lines[key] for panel in (result, *beside)]
    seeds = shared_seeds(lines)
    if not seeds:
        return Check(statement, where, "no seed in all panels", "not measured", reading=reading)
    falls = mean_of(FALL.measure, lines, seeds)
    failures = [failure for line in lines for failure in line.failures]
    failed = sum(failure is not None for failure in failures)
    note = f"; {failed} of {len(failures)} runs failed" if failed else ""
    mean, least, most = (FALL.text(float(value)) for value in (falls.mean(), falls.min(), falls.max()))
    measured = f"largest fall {mean}, from {least} to {most}{note}"
    outcome = Gap(falls, np.full_like(falls, MARKED_DROP), seeds).between(0.0)
    return Check(statement, where, measured, outcome, seeds, reading)


def described(mine: str, other: str, one: Gap, quantity: Quantity, lower: bool = False) -> str:
    """Both numbers, their difference with its interval, and the number of seeds with that sign."""
    first, second = (quantity.text(float(values.mean())) for values in (one.first, one.second))
    text = f"{mine} {first}, {other} {second}"
    if np.isfinite(one.mean):
        text += f": {quantity.signed(one.mean)}{quantity.step}{_between(one, quantity)}"
    count = len(one.differences)
    if count == 1:
        return text
    agreeing = int(np.sum(one.differences < 0 if lower else one.differences > 0))
    return f"{text}, {'below' if lower else 'above'} in {agreeing} of {count} seeds"


def short(mine: str, other: str, one: Gap, quantity: Quantity) -> str:
    """What is compared, the difference with its interval, and in what, unless it is the final accuracy."""
    if not np.isfinite(one.mean):
        return f"{other}: never"
    what = "" if quantity is FINAL else f", {quantity.name}"
    return f"{mine} against {other}: {quantity.signed(one.mean)}{quantity.step}{_between(one, quantity)}{what}"


def _between(one: Gap, quantity: Quantity) -> str:
    ends = one.interval
    if ends.low is None or ends.high is None:
        return ""
    return f" [{quantity.signed(ends.low)}, {quantity.signed(ends.high)}]"


def name_in(result: PanelCurves, key: str) -> str:
    """The label of a planned curve."""
    return next(line.label for line in result.panel.lines if line.key == key)


def _gaps(
    result: PanelCurves, quantity: Quantity, key: str, rivals: Sequence[str], beside: Sequence[PanelCurves] = ()
) -> dict[str, Gap] | str:
    """The difference to every rival, or the reason why there is none."""
    if missing := _missing(result, [key, *rivals], beside):
        return missing
    lines = {one: [panel.lines[one] for panel in (result, *beside)] for one in (key, *rivals)}
    gaps = {rival: gap(quantity.measure, lines[key], lines[rival]) for rival in rivals}
    apart = [name_in(result, rival) for rival, one in gaps.items() if one is None]
    if apart:
        return f"no seed with both {name_in(result, key)} and {', '.join(apart)}"
    return {rival: one for rival, one in gaps.items() if one is not None}


def _where(result: PanelCurves, beside: Sequence[PanelCurves]) -> str:
    return " and ".join([result.panel.title, *(other.panel.short for other in beside)])


def _missing(result: PanelCurves, keys: Sequence[str], beside: Sequence[PanelCurves] = ()) -> str:
    absent = [name_in(result, key) for key in keys if any(key not in one.lines for one in (result, *beside))]
    return f"planned, not run: {', '.join(absent)}" if absent else ""
