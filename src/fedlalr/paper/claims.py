"""The claims about training curves, and the rule that decides each. Terms: `verdicts.DEFINITIONS`.

Line numbers in comments are those of the paper's LaTeX source, as one file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fedlalr.algorithms.registry import PAPER_METHODS
from fedlalr.paper.comparing import above, above_most, drops, like
from fedlalr.paper.curve_measures import (
    EARLY,
    EARLY_LOSS,
    EARLY_ROUGHNESS,
    FALL,
    FINAL,
    FINAL_LOSS,
    HALF,
    ROUGHNESS,
    Quantity,
    rounds_to,
)
from fedlalr.paper.curves import PanelCurves
from fedlalr.paper.verdicts import CONTROL, SLIGHTLY, TARGETS, Check, Claim

Cast = Mapping[str, str]
"""The curve of each method in one reading: its own as printed, or one with tuned settings."""
PRINTED, TUNED = "as printed", "tuned"
DROPPING = ("fedadam", "fedamsv1", "fedamsv2")


def cifar_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    fastest, best, comparable = [], [], []
    for result in results:
        for reading, cast in casts(result):
            mine, *others = cast.values()
            # 554, 618: "converges the fastest in the six algorithms", "in the early period"
            fastest += _in_every_window(result, mine, others, reading)
            # 556: "slightly better performance than other methods" at the end
            best.append(above(result, FINAL, mine, others, reading))
            # 97: FedLALR and FedAdam "show comparable generalization performance"
            comparable.append(like(result, FINAL, mine, cast["fedadam"], reading))
    groups = dict.fromkeys(result.panel.group for result in results)
    stable = [
        check for group in groups for check in _falls([result for result in results if result.panel.group == group])
    ]
    return _claims({"1a": fastest, "1b": best, "1c": comparable, "2": stable})


def _falls(results: Sequence[PanelCurves]) -> Iterator[Check]:
    """618: "across both heterogeneous settings", FedLALR is "more stable than both FedAdam, FedAMSv1, and FedAMSv2, as
    the latter three exhibit significant accuracy drops". So both panels are judged together; each alone is shown. If
    runs of one are missing, each is judged alone."""
    first, *beside = results
    for reading, cast in casts(first):
        ready = all(cast[method] in result.lines for result in results for method in ("fedlalr", *DROPPING))
        together = bool(beside) and ready
        readings = [(first, beside, reading)] if together else []
        readings += [(result, [], CONTROL if together else reading) for result in results]
        for result, others, told in readings:
            for other in DROPPING:
                yield above(result, FALL, cast["fedlalr"], (cast[other],), told, lower=True, beside=others)
            for other in DROPPING:
                yield drops(result, cast[other], told, beside=others)


def scalability_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    equivalent, steepest = [], []
    for group in dict.fromkeys(result.panel.group for result in results):
        of_group = [result for result in results if result.panel.group == group]
        usual = next(result for result in of_group if not result.panel.compares)
        for result in of_group:
            if result.panel.compares:
                # 627: "When compared to experiments involving 50 clients, our method produces equivalent results"
                equivalent.append(like(result, FINAL, "fedlalr", "fedlalr", PRINTED, against=usual))
                # 627: "the accuracy curve of our method exhibits the steepest ascent"
                for reading, cast in casts(result):
                    mine, *others = cast.values()
                    steepest += _in_every_window(result, mine, others, reading)
    return _claims({"3a": equivalent, "3b": steepest})


def interval_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    """With intervals counted in epochs, which we take to be the paper's meaning, and in steps."""
    best, alike, cheaper = [], [], []
    for result in results:
        reading = result.panel.short
        fixed, first, second = (line.key for line in result.panel.lines)
        # 652: adaptive "surpasses the fixed interval method"; 654: (3, 4.0) is better in "both loss and accuracy"
        best += [
            above(result, FINAL, first, (second, fixed), reading),
            above(result, FINAL_LOSS, first, (second, fixed), reading, lower=True),
        ]
        # 652: "similar performance", the loss "descends more rapidly" early, to a "comparable final loss"
        alike += [
            like(result, FINAL, second, fixed, reading),
            above(result, EARLY_LOSS, second, (fixed,), reading, lower=True),
            like(result, FINAL_LOSS, second, fixed, reading),
        ]
        # 208, 345: the adaptive interval "reduces the communication"; all intervals send the same bytes in a round
        for key in (first, second):
            cheaper += [
                above(result, one, key, (fixed,), reading, lower=True, window=one.name)
                for one in _races(result, [key, fixed])
            ]
    return _claims({"4a": best, "4b": alike, "4c": cheaper})


def shakespeare_claims(results: Sequence[PanelCurves]) -> list[Claim]:
    best, leading, others_apart, others_pooled = [], [], [], []
    for result in results:
        for reading, cast in casts(result):
            mine, fedavg, fedadam, v1, v2, lafedopt = cast.values()
            # 606: "the best result both on the Non-IID and IID settings"
            best.append(above(result, FINAL, mine, [*cast.values()][1:], reading))
            if result.panel.short == "IID":
                # 608: "the highest accuracy and convergence rate"
                best += _in_every_window(result, mine, [*cast.values()][1:], reading)
                for other in (fedavg, lafedopt, fedadam):
                    # 608: they "demonstrate rapid convergence", and "their ultimate accuracy does not match up"; with
                    # FedLALR, four of the six are rapid
                    others_pooled.append(above_most(result, EARLY, other, [*cast.values()], reading, least=2))
                    others_pooled.append(above(result, FINAL, mine, (other,), reading))
                # 608: FedAMSv1 and FedAMSv2 are "lacking smoothness"
                others_pooled += [above(result, ROUGHNESS, one, (mine,), reading) for one in (v1, v2)]
                continue
            for leader in (mine, lafedopt):
                # 607: both "excel in convergence rate and accuracy when compared to other baseline methods"
                leading += [above(result, one, leader, (fedavg, fedadam, v1, v2), reading) for one in (EARLY, FINAL)]
            # 607: FedLALR "converges slightly slower than LAfedopt"
            leading.append(like(result, EARLY, lafedopt, mine, reading, limits=(0.0, SLIGHTLY)))
            # 607: FedAvg is "converging quickly" and "falls short in its final performance compared to other methods"
            others_apart += [
                above_most(result, EARLY, fedavg, [*cast.values()], reading),
                above(result, FINAL, fedavg, [key for key in cast.values() if key != fedavg], reading, lower=True),
            ]
            for one in (v1, v2):
                # 607: both FedAMS "exhibit slow convergence and display instability during the initial phases"
                others_apart += [
                    above_most(result, EARLY, one, [*cast.values()], reading, lower=True),
                    above(result, EARLY_ROUGHNESS, one, (mine,), reading),
                ]
    return _claims({"5a": best, "5b": leading, "5c": others_apart, "5d": others_pooled})


def _claims(parts: Mapping[str, Sequence[Check]]) -> list[Claim]:
    return [Claim(key, tuple(checks)) for key, checks in parts.items()]


def casts(result: PanelCurves) -> Iterator[tuple[str, Cast]]:
    """The readings of a panel: settings as printed and, if other settings are shown beside them, tuned.

    A method without other settings keeps the printed ones.
    """
    yield PRINTED, {method: method for method in PAPER_METHODS}
    tuned = {
        line.config.algorithm.name: line.key for line in reversed(result.panel.lines) if line.key not in PAPER_METHODS
    }
    if tuned:
        yield TUNED, {method: tuned.get(method, method) for method in PAPER_METHODS}


def _in_every_window(result: PanelCurves, mine: str, others: Sequence[str], reading: str) -> list[Check]:
    """Whether a curve rises fastest: as the first to several accuracies, and by its mean over early rounds."""
    races = [
        above(result, one, mine, others, reading, lower=True, window=one.name)
        for one in _races(result, [mine, *others])
    ]
    means = [above(result, one, mine, others, reading, window=one.name) for one in (EARLY, HALF)]
    return races + means


def _races(result: PanelCurves, keys: Sequence[str]) -> list[Quantity]:
    """Rounds to those targets that some of the curves reach; to all before they are run."""
    lines = [result.lines[key] for key in keys if key in result.lines]
    best = max((float(np.nan_to_num(curves.accuracy).max()) for curves in lines), default=1.0)
    return [rounds_to(target) for target in TARGETS if target <= best]
