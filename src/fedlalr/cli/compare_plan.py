"""What `fedlalr compare` is going to run, and whether its directory is free for that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedlalr.cli.variations import Variation

if TYPE_CHECKING:
    from fedlalr.config import Config
    from fedlalr.config.grid import GridPoint
    from fedlalr.config.jobs import Job

MOST_NAMED = 5
"""Differences that an error names."""


@dataclass(frozen=True)
class PlannedComparison:
    """The comparison of one variation."""

    variation: Variation
    config: Config
    names: Sequence[str]
    folder: Path

    @property
    def title(self) -> str:
        """What it is about, in headings and figures."""
        return f"{self.config.name} ({self.variation.label})" if self.variation.settings else self.config.name

    @property
    def grid_folder(self) -> Path:
        return self.folder / "grid"

    def runs(self, seeds: int, config: Config | None = None) -> dict[str, list[Job]]:
        """The runs that are compared, of each method; under the tuned configuration where there is one."""
        from fedlalr.config import with_method
        from fedlalr.config.jobs import Job

        chosen = config or self.config
        return {
            name: [
                Job(with_method(chosen, name, seed=seed), self.folder / name / f"seed-{seed}")
                for seed in range(chosen.seed, chosen.seed + seeds)
            ]
            for name in self.names
        }

    def tuning(self, seeds: int) -> list[GridPoint]:
        from fedlalr.config.grid import trials

        return trials(self.config, self.names, seeds, self.grid_folder)


def in_words(parts: Sequence[PlannedComparison], seeds: int, grid_seeds: int | None) -> str:
    """How many runs there will be, and what they are made of."""
    methods, total = len(parts[0].names), sum(len(part.names) * seeds for part in parts)
    factors = f"{_counted(methods, 'method')} × {_counted(seeds, 'seed')}"
    if grid_seeds is not None:
        tuning = [len(part.tuning(grid_seeds)) for part in parts]
        total += sum(tuning) * grid_seeds
        settings = _counted(tuning[0] // methods, "setting")
        factors = f"{_counted(methods, 'method')} × {settings} × {_counted(grid_seeds, 'seed')} to tune, then {factors}"
    each = f"for each of {len(parts)} variations " if len(parts) > 1 else ""
    return f"{_counted(total, 'run')}: {each}{factors}"


def refuse_others(parts: Sequence[PlannedComparison], seeds: int, grid_seeds: int | None) -> None:
    """Refuse folders with runs of other settings, which would be lost.

    What the grid chooses is known only later; what an earlier tuning chose may be replaced.
    """
    for part in parts:
        chosen: dict[str, set[str]] = {}
        if grid_seeds is not None:
            trials = part.tuning(grid_seeds)
            _refuse([job for trial in trials for job in trial.jobs], part.folder)
            if part.grid_folder.is_dir():
                for trial in trials:
                    chosen.setdefault(trial.method, set()).update(f"algorithm.{option}" for option in trial.settings)
        for name, jobs in part.runs(seeds).items():
            _refuse(jobs, part.folder, chosen.get(name, ()))


def replacing(jobs: Sequence[Job], folder: Path) -> str | None:
    """What is said where runs have rates that an earlier tuning chose, and not this one."""
    from fedlalr.config.jobs import changes

    count = sum(bool(changes(job)) for job in jobs)
    return f"replacing {_counted(count, 'run')} with rates of an earlier tuning in {folder}" if count else None


def _refuse(jobs: Sequence[Job], folder: Path, ignored: Collection[str] = ()) -> None:
    from fedlalr.config import ConfigError
    from fedlalr.config.jobs import changes

    different = [(job, found) for job in jobs if (found := changes(job, ignored))]
    if not different:
        return
    job, found = different[0]
    named = "; ".join(found[:MOST_NAMED]) + (f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else "")
    others = f" ({_counted(len(different), 'run')} in all)" if len(different) > 1 else ""
    raise ConfigError(
        f"{folder} holds runs of other settings, which this comparison would replace: in {job.folder} {named}{others}. "
        f"Choose another --run-dir, or delete {folder} if its runs are no longer wanted"
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
