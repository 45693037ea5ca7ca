"""How the labels fell on the clients of the reported runs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedlalr.config import Config, build_population
from fedlalr.data import sources
from fedlalr.data.heterogeneity import Counts, count_labels, summarise
from fedlalr.report.runs import ReportedRun

MOST_PARTITIONS = 6
"""Each may take a second to deal again."""


@dataclass(frozen=True)
class PartitionView:
    """One partition: a table of counts, or why there is none."""

    label: str
    counts: Counts | None = None
    """Samples of each class, `[N, K]`."""
    facts: tuple[str, ...] = ()
    missing: str = ""


def view_partitions(runs: Iterable[ReportedRun]) -> list[PartitionView]:
    """The different partitions of some runs, dealt again from data that is on this machine. Nothing is downloaded."""
    configs: dict[str, Config] = {}
    for run in runs:
        if run.config is not None:
            key = json.dumps(
                [run.config.data.model_dump(), run.config.partition.model_dump(), partition_seed(run.config)]
            )
            configs.setdefault(key, run.config)
    views = [_view(config) for config in list(configs.values())[:MOST_PARTITIONS]]
    left = len(configs) - len(views)
    return views + ([PartitionView("…", missing=f"{left} more partitions are not drawn.")] if left else [])


def partition_seed(config: Config) -> int:
    return config.seed if config.partition.seed is None else config.partition.seed


def _view(config: Config) -> PartitionView:
    scheme = config.partition.scheme
    skew = f" {config.partition.alpha:g}" if scheme.startswith("dirichlet") else ""
    label = f"{config.data.name}, {scheme}{skew}, seed {partition_seed(config)}"
    here = {data.name: data.where for data in sources.available()}
    if config.data.folder is None and here[config.data.name] is None:
        fetch = f"fedlalr data fetch {config.data.name}"
        return PartitionView(label, missing=f"{config.data.name} is not on this machine; get it with: {fetch}")
    try:
        population = build_population(config)
        if population.targets.is_floating_point() or population.targets.ndim != 1:
            return PartitionView(label, missing="The targets are not classes.")
        counts = count_labels(population.targets.numpy(), population.partition, population.classes)
    except (ValueError, TypeError, sources.DataNotFound, sources.DataCorrupt) as error:
        return PartitionView(label, missing=f"It cannot be dealt again: {error}")
    return PartitionView(label, np.asarray(counts), tuple(summarise(counts).lines()))
