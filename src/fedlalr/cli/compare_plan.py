"""The runs planned by `fedlalr compare`, one comparison for every combination of the values of `--vary`, and the check
that its directory has no other runs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedlalr.config import Config, ConfigError, with_method
from fedlalr.config.errors import shortened
from fedlalr.config.grid import GridPoint, trials
from fedlalr.config.jobs import Job, changes
from fedlalr.config.yaml_file import parse
from fedlalr.report.rerun_command import title_of
from fedlalr.report.tables import counted, default_rates_notes, name_of

MOST_NAMED = 5
"""Differences listed in an error."""


@dataclass(frozen=True)
class Variation:
    """One combination of settings."""

    settings: dict[str, Any]

    @property
    def label(self) -> str:
        """Its name in titles; empty without variation."""
        return ",".join(
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in self.settings.items()
        ).replace("/", "_")

    @property
    def overrides(self) -> list[str]:
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.settings.items()]


def parse_variations(texts: Sequence[str]) -> list[Variation]:
    """All combinations of the values; a single variation without changes if none are given.

    >>> [variation.label for variation in parse_variations(["rounds=5,9", "partition=iid,shards"])]
    ['rounds=5,partition=iid', 'rounds=5,partition=shards', 'rounds=9,partition=iid', 'rounds=9,partition=shards']
    """
    axes: dict[str, list[Any]] = {}
    for text in texts:
        key, values = _axis(text)
        if key in axes:
            raise _unusable(text, f"{key} is varied twice; give all its values in one --vary")
        axes[key] = values
    return [Variation(dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def _axis(text: str) -> tuple[str, list[Any]]:
    key, equals, written = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise _unusable(text, "write KEY=A,B, such as partition.alpha=0.1,0.6")
    if key == "seed":
        raise _unusable(text, "vary the seed with --seeds")
    try:
        values = parse(written if written.lstrip().startswith("[") else f"[{written}]")
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # the latter two: huge numbers, deep nesting
        raise _unusable(text, f"its values cannot be read: {error}") from error
    if not isinstance(values, list) or not values or None in values:
        raise _unusable(text, "separate the values with commas, such as partition.alpha=0.1,0.6")
    if any(values.count(value) > 1 for value in values):
        raise _unusable(text, "a value is given twice")
    return key, values


def _unusable(text: str, why: str) -> Exception:
    return ConfigError(f"--vary {shortened(text)!r} cannot be used: {why}")


@dataclass(frozen=True)
class PlannedComparison:
    """The comparison of one variation."""

    variation: Variation
    config: Config
    names: Sequence[str]
    folder: Path

    @property
    def title(self) -> str:
        """Its name in headings."""
        return self._varied(self.config.name)

    @property
    def figure_title(self) -> str:
        """What its figure shows."""
        return self._varied(title_of(self.config))

    def _varied(self, name: str) -> str:
        return f"{name} ({self.variation.label})" if self.variation.settings else name

    @property
    def grid_folder(self) -> Path:
        return self.folder / "grid"

    def runs(self, seeds: int, config: Config | None = None) -> dict[str, list[Job]]:
        """The runs of each method, with the tuned configuration if given."""
        chosen = config or self.config
        return {
            name: [
                Job(with_method(chosen, name, seed=seed), self.folder / name / f"seed-{seed}")
                for seed in range(chosen.seed, chosen.seed + seeds)
            ]
            for name in self.names
        }

    def tuning(self, seeds: int) -> list[GridPoint]:
        return trials(self.config, self.names, seeds, self.grid_folder)

    def rate_notes(self) -> list[str]:
        """The notes on learning rates that are not tuned."""
        return default_rates_notes({name_of(name): with_method(self.config, name) for name in self.names})


def in_words(parts: Sequence[PlannedComparison], seeds: int, grid_seeds: int | None) -> str:
    """The number of runs, and the factors it is made of."""
    methods, total = len(parts[0].names), sum(len(part.names) * seeds for part in parts)
    factors = f"{counted(methods, 'method')} × {counted(seeds, 'seed')}"
    if grid_seeds is not None:
        tuning = [len(part.tuning(grid_seeds)) for part in parts]
        total += sum(tuning) * grid_seeds
        settings = counted(tuning[0] // methods, "setting")
        factors = f"{counted(methods, 'method')} × {settings} × {counted(grid_seeds, 'seed')} to tune, then {factors}"
    each = f"{len(parts)} variations × (" if len(parts) > 1 else ""
    return f"{counted(total, 'run')}: {each}{factors}{')' if each else ''}"


def reject_other_runs(parts: Sequence[PlannedComparison], seeds: int, grid_seeds: int | None) -> None:
    """Reject folders with runs of other settings, which would be lost.

    The grid's choices are not known yet; learning rates chosen by an earlier tuning may be replaced.
    """
    for part in parts:
        chosen: dict[str, set[str]] = {}
        if grid_seeds is not None:
            trials = part.tuning(grid_seeds)
            _reject([job for trial in trials for job in trial.jobs], part.folder)
            if part.grid_folder.is_dir():
                for trial in trials:
                    chosen.setdefault(trial.method, set()).update(f"algorithm.{option}" for option in trial.settings)
        for name, jobs in part.runs(seeds).items():
            _reject(jobs, part.folder, chosen.get(name, ()))


def replacing(jobs: Sequence[Job], folder: Path) -> str | None:
    """A message if runs with the learning rates of an earlier tuning are replaced."""
    count = sum(bool(changes(job)) for job in jobs)
    return f"replacing {counted(count, 'run')} with learning rates of an earlier tuning in {folder}" if count else None


def _reject(jobs: Sequence[Job], folder: Path, ignored: Collection[str] = ()) -> None:
    different = [(job, found) for job in jobs if (found := changes(job, ignored))]
    if not different:
        return
    job, found = different[0]
    named = "; ".join(found[:MOST_NAMED]) + (f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
    others = f" ({counted(len(different), 'run')} in all)" if len(different) > 1 else ""
    rounds = job.config.rounds
    shorter = all(not changes(one, {*ignored, "rounds"}) and one.rounds_done() < rounds for one, _ in different)
    extend = f"Extend each with fedlalr resume {job.folder} rounds={rounds}, choose" if shorter else "Choose"
    raise ConfigError(
        f"{folder} contains runs with other settings, which this comparison would replace: in {job.folder} "
        f"{named}{others}. {extend} another --run-dir, or delete {folder} if its runs are no longer needed"
    )
