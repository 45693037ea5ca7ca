"""The label distributions of the clients of the reported runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlalr.config import Config, build_population
from fedlalr.config.own import is_own
from fedlalr.data import sources
from fedlalr.data.heterogeneity import Counts, count_labels, summarise
from fedlalr.report.groups import fewest
from fedlalr.report.runs import ReportedRun
from fedlalr.report.sections import shown

OPTIONS = ("classes_per_client", "sigma", "min_size")
"""Options of some schemes; None for the scheme's default."""
MOST_PARTITIONS = 6
"""Recomputing one may take a second."""


@dataclass(frozen=True)
class PartitionView:
    """One partition: a table of counts, or the reason why there is none."""

    label: str
    counts: Counts | None = None
    """Samples of each class, `[N, K]`."""
    facts: tuple[str, ...] = ()
    missing: str = ""


def view_partitions(runs: Iterable[ReportedRun]) -> list[PartitionView]:
    """The distinct partitions of some runs, recomputed from data on this machine. Nothing is downloaded."""
    configs: dict[str, Config] = {}
    own: dict[str, None] = {}
    for run in runs:
        if run.config is not None and is_own(run.config.data.name):
            own.setdefault(run.config.data.name)
        elif run.config is not None:
            configs.setdefault(json.dumps(_settings(run.config)), run.config)
    labels = _labels(list(configs.values()))
    views = [
        _view(config, label) for config, label in list(zip(configs.values(), labels, strict=True))[:MOST_PARTITIONS]
    ]
    left = len(configs) - len(views)
    views += [PartitionView(name, missing="This function made the clients; a report does not run it.") for name in own]
    return views + ([PartitionView("…", missing=f"{left} more partitions are not shown.")] if left else [])


def _settings(config: Config) -> dict[str, Any]:
    """Everything a partition depends on."""
    dealt = config.partition.model_dump() | {"seed": config.partition_seed}
    if not config.partition.scheme.startswith("dirichlet"):
        del dealt["alpha"]
    return dealt | {f"data.{name}": value for name, value in config.data.model_dump().items()}


def _labels(configs: Sequence[Config]) -> list[str]:
    """The data set, the scheme with its given options, and whatever else distinguishes partitions."""
    settings = [_settings(config) for config in configs]
    told = ["data.name", "scheme", "alpha", *OPTIONS, "seed"]
    besides = fewest([{name: one[name] for name in one if name not in told} for one in settings])
    labels = []
    for one in settings:
        skew = f" {one['alpha']:g}" if "alpha" in one else ""
        given = [name for name in (*OPTIONS, *besides) if one[name] is not None]
        words = [f"{one['scheme']}{skew}", *(f"{name} {shown(one[name])}" for name in given), f"seed {one['seed']}"]
        labels.append(", ".join([one["data.name"], *words]))
    return labels


def _view(config: Config, label: str) -> PartitionView:
    if config.data.is_missing:
        fetch = f"fedlalr data fetch {config.data.name}"
        return PartitionView(label, missing=f"{config.data.name} is not on this machine; get it with: {fetch}")
    try:
        population = build_population(config)
        if population.targets.is_floating_point() or population.targets.ndim != 1:
            return PartitionView(label, missing="The targets are not classes.")
        counts = count_labels(population.targets.numpy(), population.partition, population.classes)
    except (ValueError, TypeError, sources.DataNotFound, sources.DataCorrupt) as error:
        return PartitionView(label, missing=f"It cannot be recomputed: {error}")
    return PartitionView(label, np.asarray(counts), tuple(summarise(counts).lines()))
