"""Tuning: the same number of learning rate settings for every method, evaluated on held-out training samples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlalr.algorithms import registry
from fedlalr.common.files import as_file_name
from fedlalr.config.errors import ConfigError
from fedlalr.config.jobs import Job
from fedlalr.config.loading import check, with_method
from fedlalr.config.schema import Config, Settings
from fedlalr.federation import Record
from fedlalr.federation.record import judged_losses

VALIDATION = 0.2
"""Default share of the training samples held out for tuning."""
FIRST_SEED = 1000
"""Offset of the seeds of tuning runs, so that reported runs use other seeds."""
RATES = ("lr", "server_lr")

_HALF_DECADES = tuple(10 ** (k / 2) for k in range(-4, 5))
_THREE = _HALF_DECADES[3:6]


@dataclass(frozen=True)
class GridPoint:
    """One setting of a method's learning rates, run once per tuning seed."""

    method: str
    settings: Settings
    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class Choice:
    """The best setting of a method, and the scores of all: accuracies or, without any, negative losses."""

    method: str
    settings: Settings
    score: float
    tried: tuple[tuple[Settings, float], ...]
    """Every setting with its score, in the order of the grid."""
    at_edge: tuple[str, ...]
    """Rates whose chosen value is the smallest or largest of several: a wider grid might be better."""
    by_loss: bool = False


def points(config: Config, method: str) -> list[Settings]:
    """The settings to try: the configured grid, or nine half-decades around the method's configured rates.

    A method with one rate gets nine values; a method that also has a server rate gets three of each.
    """
    axes = config.grid.get(method) or _around(config, method)
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def trials(config: Config, methods: Sequence[str], seeds: int, folder: Path) -> list[GridPoint]:
    """All tuning runs. For a fair comparison, all methods must have the same number of settings."""
    if config.is_personal and config.holdout is None:
        raise ConfigError(
            "--grid tunes on held-out samples, but with personal or buffers=local only each client's own model can be "
            "evaluated: set holdout=0.2"
        )
    each = {method: points(config, method) for method in methods}
    counts = {method: len(settings) for method, settings in each.items()}
    if len(set(counts.values())) > 1:
        tried = ", ".join(f"{count} setting{'s' * (count > 1)} of {method}" for method, count in counts.items())
        raise ConfigError(f"the grid has {tried}; give every method the same number")
    return [_trial(config, method, settings, seeds, folder) for method in methods for settings in each[method]]


def on_default_rates(config: Config) -> bool:
    """Whether a run has its method's default learning rates, and the table `methods` does not set them.

    >>> from fedlalr.config import load
    >>> on_default_rates(load("quickstart", ["algorithm=fedadamw"])), on_default_rates(load("quickstart"))
    (True, False)
    """
    method, own = config.algorithm.name, config.algorithm.options
    usual, listed = registry.options(method), config.methods.get(method, {})
    return not any(rate in listed or own[rate] != usual[rate] for rate in _rates(method, own))


def choose(method: str, scored: Sequence[tuple[Settings, float]], by_loss: bool = False) -> Choice:
    """The setting with the best score; the first one in case of a tie. A failed setting has the score −∞."""
    settings, score = max(scored, key=lambda pair: pair[1])
    if score == -math.inf:
        raise ConfigError(f"every setting of {method} in the grid failed; try smaller learning rates")
    values = {name: sorted({one[name] for one, _ in scored}) for name in settings}
    edge = tuple(name for name, tried in values.items() if len(tried) > 1 and settings[name] in (tried[0], tried[-1]))
    return Choice(method, settings, score, tuple(scored), edge, by_loss)


def without_accuracy(runs: Iterable[Sequence[Record]]) -> bool:
    """Whether runs have records but no accuracy: no test set, or targets that are not classes."""
    records = [record for run in runs for record in run]
    return bool(records) and all(record.accuracy is None for record in records)


def qualities(records: Sequence[Record], by_loss: bool) -> list[float | None]:
    """The accuracy of every round, or its negative loss; None if it has none."""
    if not by_loss:
        return [record.accuracy for record in records]
    return [-loss if loss is not None and math.isfinite(loss) else None for loss in judged_losses(records)]


def score(accuracies: Sequence[Sequence[float | None]], rounds: int) -> float:
    """The mean over seeds of the accuracy in the last tenth of the rounds; −∞ if a run did not finish.

    >>> score([[0.1, 0.5], [0.2, 0.75]], rounds=2)
    0.625
    """
    tail = max(1, rounds // 10)
    finals = []
    for run in accuracies:
        last = [accuracy for accuracy in run[-tail:] if accuracy is not None]
        if len(run) < rounds or not last:
            return -math.inf
        finals.append(sum(last) / len(last))
    return sum(finals) / len(finals)


def _trial(config: Config, method: str, settings: Settings, seeds: int, folder: Path) -> GridPoint:
    name = as_file_name(",".join(f"{option}={value:g}" for option, value in settings.items()))
    jobs = []
    for seed in range(config.seed + FIRST_SEED, config.seed + FIRST_SEED + seeds):
        tree = with_method(config, method, seed=seed).model_dump()
        if not config.is_personal:  # then the clients hold out samples
            tree["data"]["validation"] = config.data.validation or VALIDATION
        tree["algorithm"] |= settings
        jobs.append(Job(check(tree), folder / method / name / f"seed-{seed}"))
    return GridPoint(method, settings, tuple(jobs))


def _around(config: Config, method: str) -> dict[str, list[float]]:
    own = with_method(config, method).algorithm.options
    rates = _rates(method, own)
    factors = _HALF_DECADES if len(rates) == 1 else _THREE
    # two digits are precise enough, and easier to read in a table
    return {name: [float(f"{own[name] * factor:.2g}") for factor in factors] for name in rates}


def _rates(method: str, own: Settings) -> Sequence[str]:
    """The learning rates of a method with its settings that are worth tuning."""
    rates: Sequence[str] | None = getattr(registry.create(method, **own), "rates", None)
    return [name for name in RATES if name in own] if rates is None else rates
