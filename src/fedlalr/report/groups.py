"""Groups of runs that differ only in their seed: their labels and their curves."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from fedlalr.federation import Record
from fedlalr.federation.record import held_out_loss, judged_on
from fedlalr.report.comparison import Curve
from fedlalr.report.runs import ReportedRun
from fedlalr.report.tables import name_of

Settings = Mapping[str, Any]
"""Dotted name → value."""
MOST_POINTS = 2000
"""A longer curve is drawn at this many evenly spaced points."""
OWN = "metrics/"
"""Prefix of the names of the caller's own metrics."""
_DIGEST = re.compile(r"\b[0-9a-f]{16}\b")
"""Values that a checkpoint writes for a module, a loss or data, of no use to a reader."""


@dataclass(frozen=True)
class Group:
    """One method with one group of settings, over its seeds."""

    label: str
    settings: Settings
    runs: tuple[ReportedRun, ...]

    @property
    def method(self) -> str:
        return method_of(self.runs[0])

    @property
    def records(self) -> list[Record]:
        """Of all its runs."""
        return [record for run in self.runs for record in run.records]


def group_runs(runs: Iterable[ReportedRun]) -> list[Group]:
    """Group runs with the same settings, in the order of their seeds; FedLALR first, the others in the given order."""
    together: dict[str, list[ReportedRun]] = {}
    for run in runs:
        together.setdefault(json.dumps([run.config is None, settings_of(run)], sort_keys=True), []).append(run)
    members = [part for group in together.values() for part in _distinct(group)]
    members.sort(key=lambda group: method_of(group[0]) != "FedLALR")
    labels = _labels(members)
    return [Group(label, settings_of(g[0]), tuple(g)) for label, g in zip(labels, members, strict=True)]


def _distinct(runs: list[ReportedRun]) -> list[list[ReportedRun]]:
    """Runs with the same settings in the order of their seeds; one group per run if a program did not vary the seed.

    A checkpoint records less than a configuration: two programs may differ in something else, such as the initial
    weights. A seed that was run twice, or copied, does not count as another seed: such runs are separate groups.
    """
    seeds = [run.seed for run in runs]
    if runs[0].config is None and (None in seeds or len(set(seeds)) < len(seeds)):
        return [[run] for run in runs]
    times: Counter[int | None] = Counter()
    parts: list[list[ReportedRun]] = [[] for _ in range(max(Counter(seeds).values()))]
    for run in sorted(runs, key=lambda run: run.seed or 0):
        parts[times[run.seed]].append(run)
        times[run.seed] += 1
    return parts


def settings_of(run: ReportedRun) -> Settings:
    """Everything the result depends on, except the seed."""
    if run.config is None:
        return _from_facts(run.facts)
    flat: dict[str, Any] = {}
    for name, value in run.config.problem().items():
        if name == "seed":
            continue
        if isinstance(value, dict) and name != "reduce":
            flat |= {f"{name}.{option}": inner for option, inner in value.items()}
        else:
            flat[name] = value
    return flat


def _from_facts(facts: Mapping[str, Any]) -> Settings:
    """Recorded facts as settings. The slots that a private run does not send follow from `privacy.second_moment`.

    >>> recorded = {"seed": 0, "compression": "fedlalr.Withholding", "compression.withheld": ["v_hat"]}
    >>> _from_facts(recorded), _from_facts(recorded | {"compression.up.x": "fedlalr.Int"})
    ({'compression': None}, {'compression': 'Compression', 'compression.up.x': 'Int'})
    """
    told = {n: _short(n, value) for n, value in facts.items() if n not in ("seed", "compression.withheld")}
    if "compression" in told:  # every run has an object here, most of them without any codec
        told["compression"] = "Compression" if any(n.startswith("compression.") for n in told) else None
    return told


def _short(name: str, value: Any) -> Any:
    """A fact; the library's own classes by their names alone, reductions as they are written in settings.

    >>> _short("reduce.x", "fedlalr.federation.replies.reductions.Median"), _short("local", "fedlalr.training.Epochs")
    ('median', 'Epochs')
    """
    if not isinstance(value, str) or not value.startswith("fedlalr.") or not value.replace(".", "").isidentifier():
        return value
    last = value.rpartition(".")[2]
    return last.lower() if name.startswith("reduce.") else last


def method_of(run: ReportedRun) -> str:
    """The method as written in papers, with its compression if that is a short form, or its name in the checkpoint."""
    if run.config is not None:
        form = run.config.compression
        return name_of(run.config.algorithm.name + (f"+{form}" if isinstance(form, str) else ""))
    return str(run.facts.get("algorithm", "run")).rsplit(".", 1)[-1]


def differing(settings: Sequence[Settings]) -> list[str]:
    """The names of the settings that differ.

    >>> differing([{"lr": 0.1, "rounds": 5}, {"lr": 0.2, "rounds": 5}])
    ['lr']
    """
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({json.dumps(one.get(name, "–"), sort_keys=True) for one in settings}) > 1]


def curves_of(group: Group) -> dict[str, Any] | None:
    """Means and ranges over the seeds, for the rounds that every run reached; None if there are none."""
    length = min(len(run.records) for run in group.runs)
    if not length:
        return None
    kept = np.unique(np.linspace(0, length - 1, min(length, MOST_POINTS)).round().astype(int))
    megabytes = [Curve(run.records).megabytes()[:length] for run in group.runs]
    seconds = [Curve(run.records).seconds()[:length] for run in group.runs]
    virtual = [found[:length] for run in group.runs if (found := Curve(run.records).virtual_seconds()) is not None]
    return {
        "label": group.label,
        "seeds": len(group.runs),
        "x": {
            "round": [group.runs[0].records[i].round for i in kept],
            "megabytes": plain(np.mean(megabytes, axis=0)[kept]),
            "seconds": plain(np.mean(seconds, axis=0)[kept]),
            "virtual": plain(np.mean(virtual, axis=0)[kept]) if len(virtual) == len(group.runs) else None,
        },
        "y": {name: _band(group, value, kept) for name, value in _quantities(group).items()}
        | {f"{OWN}{name}": _band(group, _metric(name), kept) for name in metrics_of([group])},
    }


def _quantities(group: Group) -> dict[str, Callable[[Record], float | None]]:
    """Without a test set there is no test loss: `record.loss` is then the training loss."""
    tested = {"loss": attrgetter("loss")} if judged_on(group.records) == "test" else {}
    always = {name: attrgetter(name) for name in ("accuracy", "train_loss", "lr")}
    return tested | always | {"held_out_loss": held_out_loss}


def metrics_of(groups: Iterable[Group]) -> list[str]:
    """The names of the caller's own metrics, in their order."""
    return list(dict.fromkeys(name for group in groups for record in group.records for name in record.metrics))


def _metric(name: str) -> Callable[[Record], float | None]:
    return lambda record: record.metrics.get(name)


def _band(group: Group, value: Callable[[Record], float | None], kept: Any) -> dict[str, list[float | None]] | None:
    values = np.array([[math.nan if (v := value(run.records[i])) is None else v for i in kept] for run in group.runs])
    if not np.isfinite(values).any():
        return None
    band = {"mean": plain(values.mean(axis=0))}
    if len(values) > 1:
        band |= {"low": plain(values.min(axis=0)), "high": plain(values.max(axis=0))}
    return band


def plain(values: Iterable[float | None]) -> list[float | None]:
    """Rounded to five digits, more than a plot can show; None if not finite."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.5g}") for value in values]


def _labels(groups: Sequence[Sequence[ReportedRun]]) -> list[str]:
    """The method, with the fewest settings that distinguish it from other groups of the same method."""
    methods = [method_of(group[0]) for group in groups]
    labels = []
    for group, method in zip(groups, methods, strict=True):
        alike = [_telling(other[0]) for other, name in zip(groups, methods, strict=True) if name == method]
        own, names = _telling(group[0]), fewest(alike)
        words = [_described(name, own[name]) for name in names if name in own]
        apart = len({json.dumps([one.get(name) for name in names]) for one in alike}) == len(alike)
        if len(alike) == 1:
            labels.append(method)
        elif apart and not any(_DIGEST.search(word) for word in words):
            labels.append(", ".join([method, *words]))
        else:
            more = f" and {len(group) - 1} more" if len(group) > 1 else ""
            labels.append(f"{method} in {group[0].path}{more}")
    return labels


def fewest(settings: Sequence[Settings]) -> list[str]:
    """A small set of setting names, preferring the first ones, whose values distinguish all entries.

    >>> fewest([{"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 2}, {"a": 1, "b": 2, "c": 3}])
    ['b', 'c']
    """
    chosen: list[str] = []
    apart = 1
    for name in differing(settings):
        kinds = {json.dumps([one.get(key) for key in [*chosen, name]]) for one in settings}
        if len(kinds) > apart:
            chosen, apart = [*chosen, name], len(kinds)
    return chosen


def _telling(run: ReportedRun) -> Settings:
    """The settings, preceded by the name of the problem."""
    return {"name": run.config.name, **settings_of(run)} if run.config else settings_of(run)


def _described(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if name == "name" else f"{name.removeprefix('algorithm.')} {text}"
