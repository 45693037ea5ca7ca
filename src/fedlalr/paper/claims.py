"""The claims about training curves, and the rule that decides each. Terms: `curve_measures.DEFINITIONS`."""

from __future__ import annotations

from collections.abc import Sequence

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.paper.curve_measures import (
    EQUIVALENT,
    MARKED_DROP,
    SLIGHTLY,
    Gap,
    Measure,
    early_accuracy,
    early_loss,
    final_accuracy,
    final_loss,
    gap,
    largest_drop,
    roughness,
)
from fedlalr.paper.curves import Curves, PanelCurves
from fedlalr.paper.plans import INTERVALS
from fedlalr.paper.verdicts import Check, Claim
from fedlalr.report.tables import name_of

OTHERS = PAPER_METHODS[1:]
_NAMES = {**INTERVALS, **{method: name_of(method) for method in PAPER_METHODS}}


def cifar_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    speed = [check for result in results for check in _first_of_all(result)]
    drops = [
        check
        for result in results
        for check in (
            *(_drop(result, method, wanted=True) for method in ("fedadam", "fedamsv1", "fedamsv2")),
            _drop(result, "fedlalr", wanted=False),
        )
    ]
    return [Claim(1, tuple(speed)), Claim(2, tuple(drops))]


def scalability_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    checks = []
    for group in dict.fromkeys(result.panel.group for result in results):
        of_group = sorted(
            (result for result in results if result.panel.group == group), key=lambda result: result.panel.cohort
        )
        checks.append(_equivalent_cohorts(of_group))
        checks += [
            above_all(result, early_accuracy, "fedlalr", OTHERS, "early accuracy")
            for result in of_group
            if result.panel.compares
        ]
    return [Claim(3, tuple(checks))]


def interval_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    checks = []
    for result in results:
        rivals = ("log-4-2", "steps-10")
        checks += [
            above_all(result, final_accuracy, "log-3-4", rivals, "final accuracy"),
            above_all(result, final_loss, "log-3-4", rivals, "final test loss", lower=True),
            _like(result, final_accuracy, "log-4-2", "steps-10", "final accuracy"),
            above_all(result, early_loss, "log-4-2", ("steps-10",), "early test loss", lower=True),
        ]
    return [Claim(4, tuple(checks))]


def shakespeare_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    checks = []
    for result in results:
        checks.append(above_all(result, final_accuracy, "fedlalr", OTHERS, "final accuracy"))
        checks += _above_those_beside(result, final_accuracy, "final accuracy")
        if result.panel.short == "IID":
            checks.append(above_all(result, early_accuracy, "fedlalr", OTHERS, "early accuracy"))
        else:
            checks.append(_slightly_above(result, early_accuracy, "lafedopt", "fedlalr", "early accuracy"))
        checks += [
            _above_most(result, "fedavg", early_accuracy, "early accuracy"),
            above_all(result, final_accuracy, "fedavg", ("fedlalr",), "final accuracy", lower=True),
        ]
        for method in ("fedamsv1", "fedamsv2"):
            checks += [
                _above_most(result, method, early_accuracy, "early accuracy", lower=True),
                above_all(result, roughness, method, ("fedlalr",), "roughness"),
            ]
    return [Claim(5, tuple(checks))]


def above_all(
    result: PanelCurves, measure: Measure, key: str, rivals: Sequence[str], word: str, lower: bool = False
) -> Check:
    """Whether one curve's measure is above (or below) that of every rival."""
    whom = " and ".join(f"that of {_name(result, rival)}" for rival in rivals)
    if len(rivals) > 2:
        whom = "every other method's" + (" with other settings" if rivals != OTHERS else "")
    mine = _name(result, key)
    statement = f"{mine}: {word} {'below' if lower else 'above'} {whom}"
    gaps = _gaps(result, measure, key, rivals)
    if isinstance(gaps, str):
        return Check(statement, result.panel.title, gaps, None)
    sign = -1 if lower else 1
    closest = min(gaps, key=lambda rival: sign * gaps[rival].mean)
    return Check(
        statement,
        result.panel.title,
        _described(mine, _name(result, closest), gaps[closest], word, lower),
        all(sign * one.mean > 0 for one in gaps.values()),
        gaps[closest].seeds,
    )


def _above_those_beside(result: PanelCurves, measure: Measure, word: str) -> list[Check]:
    """The same against other methods with settings that differ from the paper's, if requested: for FedLALR as printed,
    and with other settings of its own."""
    beside = [line for line in result.panel.lines if line.key not in PAPER_METHODS]
    others = [line.key for line in beside if line.config.algorithm.name in OTHERS]
    mine = ["fedlalr", *(line.key for line in beside if line.key not in others)]
    return [above_all(result, measure, key, others, word) for key in mine] if others else []


def _name(result: PanelCurves, key: str) -> str:
    return _NAMES[key] if key in _NAMES else next(line.label for line in result.panel.lines if line.key == key)


def _first_of_all(result: PanelCurves) -> list[Check]:
    statement = f"FedLALR: final accuracy at most {EQUIVALENT * 100:g} points below FedAdam's"
    gaps = _gaps(result, final_accuracy, "fedlalr", ("fedadam",))
    if isinstance(gaps, str):
        like = Check(statement, result.panel.title, gaps, None)
    else:
        one = gaps["fedadam"]
        told = _described(_NAMES["fedlalr"], _NAMES["fedadam"], one)
        like = Check(statement, result.panel.title, told, one.mean >= -EQUIVALENT, one.seeds)
    return [
        above_all(result, early_accuracy, "fedlalr", OTHERS, "early accuracy"),
        *_above_those_beside(result, early_accuracy, "early accuracy"),
        above_all(result, final_accuracy, "fedlalr", OTHERS, "final accuracy"),
        *_above_those_beside(result, final_accuracy, "final accuracy"),
        like,
    ]


def _drop(result: PanelCurves, key: str, wanted: bool) -> Check:
    statement = f"{_NAMES[key]}: {'a' if wanted else 'no'} marked drop"
    curves = result.lines.get(key)
    if curves is None:
        return Check(statement, result.panel.title, _missing(result, [key]), None)
    drops = largest_drop(curves)
    mean = float(drops.mean())
    each = f" (from {drops.min() * 100:.1f} to {drops.max() * 100:.1f})" if len(drops) > 1 else ""
    broke = sum(failure is not None for failure in curves.failures)
    note = f"; {broke} of {len(curves.seeds)} runs failed" if broke else ""
    return Check(
        statement,
        result.panel.title,
        f"largest fall {mean * 100:.1f} points{each}{note}",
        (mean > MARKED_DROP) == wanted,
        curves.seeds,
    )


def _equivalent_cohorts(results: Sequence[PanelCurves]) -> Check:
    where = results[0].panel.group
    statement = f"FedLALR: final accuracies of the cohorts at most {EQUIVALENT * 100:g} points apart"
    missing = [result.panel.short for result in results if "fedlalr" not in result.lines]
    if missing:
        return Check(statement, where, f"no run with {', '.join(missing)}", None)
    lines = [result.lines["fedlalr"] for result in results]
    seeds = tuple(seed for seed in lines[0].seeds if all(seed in curves.seeds for curves in lines))
    if not seeds:
        return Check(statement, where, "no seed with all cohorts", None)
    finals = [_mean_over(curves, seeds) for curves in lines]
    measured = ", ".join(
        f"{final * 100:.1f} % with {result.panel.short}" for final, result in zip(finals, results, strict=True)
    )
    return Check(statement, where, measured, max(finals) - min(finals) <= EQUIVALENT, seeds)


def _mean_over(curves: Curves, seeds: Sequence[int]) -> float:
    return float(final_accuracy(curves)[[curves.seeds.index(seed) for seed in seeds]].mean())


def _like(result: PanelCurves, measure: Measure, key: str, other: str, word: str) -> Check:
    statement = f"{_NAMES[key]}: {word} like that of {_NAMES[other]}"
    gaps = _gaps(result, measure, key, (other,))
    if isinstance(gaps, str):
        return Check(statement, result.panel.title, gaps, None)
    one = gaps[other]
    return Check(
        statement,
        result.panel.title,
        _described(_NAMES[key], _NAMES[other], one),
        abs(one.mean) <= EQUIVALENT,
        one.seeds,
    )


def _slightly_above(result: PanelCurves, measure: Measure, key: str, other: str, word: str) -> Check:
    statement = f"{_NAMES[key]}: {word} slightly above {_NAMES[other]}'s"
    gaps = _gaps(result, measure, key, (other,))
    if isinstance(gaps, str):
        return Check(statement, result.panel.title, gaps, None)
    one = gaps[other]
    return Check(
        statement, result.panel.title, _described(_NAMES[key], _NAMES[other], one), 0 < one.mean <= SLIGHTLY, one.seeds
    )


def _above_most(result: PanelCurves, key: str, measure: Measure, word: str, lower: bool = False) -> Check:
    """Whether a curve is in the top (or bottom) half: above (or below) at least three of the five others."""
    statement = f"{_NAMES[key]}: {word} {'below' if lower else 'above'} at least three of the five others"
    gaps = _gaps(result, measure, key, [method for method in PAPER_METHODS if method != key])
    if isinstance(gaps, str):
        return Check(statement, result.panel.title, gaps, None)
    count = sum((-one.mean if lower else one.mean) > 0 for one in gaps.values())
    first = next(iter(gaps.values()))
    measured = f"{first.first * 100:.1f} %, {'below' if lower else 'above'} {count} of {len(gaps)}"
    seeds = tuple(seed for seed in first.seeds if all(seed in one.seeds for one in gaps.values()))
    return Check(statement, result.panel.title, measured, count >= 3, seeds)


def _gaps(result: PanelCurves, measure: Measure, key: str, rivals: Sequence[str]) -> dict[str, Gap] | str:
    """The difference to every rival, or the reason why there is none."""
    absent = [name for name in (key, *rivals) if name not in result.lines]
    if absent:
        return _missing(result, absent)
    gaps = {rival: gap(measure, result.lines[key], result.lines[rival]) for rival in rivals}
    apart = [rival for rival, one in gaps.items() if one is None]
    if apart:
        return f"no seed with both {_name(result, key)} and {', '.join(_name(result, rival) for rival in apart)}"
    return {rival: one for rival, one in gaps.items() if one is not None}


def _missing(result: PanelCurves, keys: Sequence[str]) -> str:
    return f"no finished run of {', '.join(_name(result, key) for key in keys)}"


def _described(mine: str, other: str, one: Gap, word: str = "accuracy", lower: bool = False) -> str:
    """Both numbers, their difference with its interval, and the number of seeds with that sign."""
    scale, digits, unit, points = (1, 3, "", "") if "loss" in word else (100, 1, " %", " points")
    unit = points if word == "roughness" else unit
    first, second = (f"{value * scale:.{digits}f}{unit}" for value in (one.first, one.second))
    text = f"{mine} {first}, {other} {second}: {_signed(one.mean * scale, digits)}{points}"
    count = len(one.seeds)
    if count == 1:
        return text
    low, high = one.interval.low, one.interval.high
    ends = [_signed(end * scale, digits) for end in (low, high) if end is not None]
    between = f" [{', '.join(ends)}]" if ends else ""
    agreeing = one.negative if lower else one.positive
    return f"{text}{between}, {'below' if lower else 'above'} in {agreeing} of {count} seeds"


def _signed(value: float, digits: int) -> str:
    """
    >>> _signed(-1.25, 1), _signed(3, 1)
    ('−1.2', '+3.0')
    """
    return f"{value:+.{digits}f}".replace("-", "−")
