"""Widen the grids of methods whose best setting lies at the edge, until it lies inside; then run its other seeds.

    python benchmarks/wider_grid.py docs/results/gpt-grid.yaml docs/results/gpt --methods diloco,fedadam device=cuda

`FOLDER/grid.json` has the scores that are known. Settings of the configured grid without a score are run first. While
the best rate is the smallest or the largest of its axis, one rate beyond it is added, as far from it as its neighbour,
with all values of the other axis. The best setting then runs on all samples, with the seeds 0, 1 and 2, for the rounds
of the configuration or for `--final-rounds`, in `FOLDER/runs`. The next runs of all methods share one pool of
processes. After `--seconds` no further settings are tried; the same command resumes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

from fedlalr.common.files import as_file_name, write_whole
from fedlalr.config import Config, load, with_method
from fedlalr.config.grid import FIRST_SEED, RATES, VALIDATION, choose, qualities, score
from fedlalr.config.jobs import Event, Job, run_jobs
from fedlalr.config.loading import check

MOST = 4
"""Rates that may be added to a grid."""

Settings = dict[str, float]


class Method:
    """The grid of one method: its axes, the known scores, and what to run next."""

    def __init__(
        self, name: str, config: Config, folder: Path, known: dict[str, Any], final_rounds: int | None = None
    ) -> None:
        self.name, self.config, self.folder = name, config, folder
        self.final_rounds = final_rounds or config.rounds
        self.axes = {axis: [float(value) for value in values] for axis, values in config.grid[name].items()}
        self.scores = {self.key(one): one["score"] for one in known.get("tried", [])}
        for values, axis in zip(zip(*self.scores, strict=True), self.axes, strict=True) if self.scores else ():
            self.axes[axis] = sorted({*self.axes[axis], *values})
        self.added = 0

    def key(self, settings: Settings) -> tuple[float, ...]:
        return tuple(float(settings[axis]) for axis in self.axes)

    def jobs(self) -> list[Job]:
        """The next runs: missing settings of the grid, a further column, or the seeds of the best setting."""
        while True:
            missing = [one for one in itertools.product(*self.axes.values()) if one not in self.scores]
            if missing:
                return [self.trial(one) for one in missing]
            if not self.widen():
                break
        tree = with_method(self.config, self.name).model_dump()
        tree["algorithm"] |= self.best().settings
        seeds = [check({**tree, "seed": seed, "rounds": self.final_rounds}) for seed in range(3)]
        return [Job(one, self.folder / "runs" / self.name / f"seed-{one.seed}") for one in seeds]

    def widen(self) -> bool:
        """Add a rate beyond the edge at which the best setting lies; False if it lies inside."""
        best = self.best().settings
        for axis, values in self.axes.items():
            values.sort()
            ends = {values[0]: values[1], values[-1]: values[-2]}
            if axis in RATES and best[axis] in ends and self.added < MOST:
                values.append(float(f"{best[axis] ** 2 / ends[best[axis]]:.2g}"))
                self.added += 1
                return True
        return False

    def best(self) -> Any:
        scored = [(dict(zip(self.axes, one, strict=True)), self.scores[one]) for one in sorted(self.scores)]
        return choose(self.name, [(one, -math.inf if found is None else found) for one, found in scored])

    def trial(self, values: tuple[float, ...]) -> Job:
        """A run of the grid, as `fedlalr compare --grid` does it."""
        settings = dict(zip(self.axes, values, strict=True))
        tree = with_method(self.config, self.name, seed=FIRST_SEED).model_dump()
        tree["data"] |= {"validation": VALIDATION}
        tree["algorithm"] |= settings
        name = as_file_name(",".join(f"{option}={value:g}" for option, value in settings.items()))
        return Job(check(tree), self.folder / "grid" / self.name / name / f"seed-{FIRST_SEED}")

    def add(self, job: Job) -> None:
        """Take over the score of a finished run of the grid."""
        found = score([qualities(job.directory.records(), by_loss=False)], self.config.rounds)
        self.scores[self.key(job.config.algorithm.options)] = found if found > -math.inf else None

    def as_dict(self) -> dict[str, Any]:
        if not any(self.scores.values()):
            return {"chosen": None, "tried": []}
        best = self.best()
        tried = [{**one, "score": found if found > -math.inf else None} for one, found in best.tried]
        return {"chosen": best.settings, "score": best.score, "at_edge": list(best.at_edge), "tried": tried}


def run(methods: list[Method], workers: int, seconds: float, file: Path) -> None:
    """Run everything that the methods ask for: the next runs of all methods at once, again and again."""
    begun, left = time.monotonic(), methods

    def show(event: Event) -> None:
        if event.over is not None and event.summary is not None:
            print(f"{time.monotonic() - begun:5.0f} s", event.over.folder, event.summary["accuracy"], flush=True)

    while left and time.monotonic() - begun < seconds:
        jobs = {method.name: method.jobs() for method in left}
        run_jobs([job for some in jobs.values() for job in some], workers, show)
        left = [method for method in left if any(job.config.data.validation for job in jobs[method.name])]
        for method in left:
            for job in jobs[method.name]:
                method.add(job)
        known = json.loads(file.read_text()) if file.is_file() else {}
        write_whole(file, json.dumps(known | {one.name: one.as_dict() for one in methods}, indent=1) + "\n")
    for method in left:
        print(f"{method.name} is not finished; the same command resumes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("folder", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--methods", help="separated by commas; all of the grid without it")
    parser.add_argument("--final-rounds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_args()
    settings = load(arguments.config, arguments.overrides)
    scores = arguments.folder / "grid.json"
    stored = json.loads(scores.read_text()) if scores.is_file() else {}
    names = arguments.methods.split(",") if arguments.methods else list(settings.grid)
    run(
        [Method(name, settings, arguments.folder, stored.get(name, {}), arguments.final_rounds) for name in names],
        arguments.jobs,
        arguments.seconds,
        scores,
    )
