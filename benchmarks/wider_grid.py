"""Tune the rates of methods until the best setting has all its neighbours beside it; then run its other seeds.

    python benchmarks/wider_grid.py docs/results/gpt-grid.yaml docs/results/gpt --methods diloco,fedadam device=cuda

`FOLDER/grid.json` has the scores that are known. Settings of the configured grid without a score are run first. While a
neighbour of the best setting is untried, one step away in one of its rates, it is run; beyond the grid, a step is as
large as the last one of its axis. With `--screen N` every setting first runs for N rounds, and only the best three of
these run on to all rounds of the configuration, which decide. The best setting then runs on all samples, with the seeds
0, 1 and 2, for the rounds of the configuration or for `--final-rounds` (0: not at all), in `FOLDER/runs`. The next runs
of all methods share one pool of processes. After `--seconds` nothing further is started; the same command resumes.
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
from fedlalr.config.grid import FIRST_SEED, RATES, VALIDATION, Choice, choose, qualities, score
from fedlalr.config.jobs import Event, Job, changes, finished, run_jobs
from fedlalr.config.loading import check

MOST = 6
"""Settings that may be added to a grid."""
FINALISTS = 3
"""Settings that run on after the screening."""

Settings = dict[str, float]
Key = tuple[float, ...]


class Method:
    """The grid of one method: its axes, the known scores, and what to run next."""

    def __init__(
        self,
        name: str,
        config: Config,
        folder: Path,
        known: dict[str, Any],
        screen: int | None = None,
        final_rounds: int | None = None,
    ) -> None:
        self.name, self.config, self.folder = name, config, folder
        self.screen = screen or config.rounds
        self.final_rounds = config.rounds if final_rounds is None else final_rounds
        self.axes = {axis: [float(value) for value in values] for axis, values in config.grid[name].items()}
        self.screened: dict[Key, float] = {}
        """Scores after the rounds of the screening, −∞ for a failed run."""
        self.scores: dict[Key, float] = {}
        """Scores after all rounds."""
        for one in known.get("tried", []):
            key = self.key(one)
            self.screened[key] = _number(one.get("screened", one.get("score")))
            if "score" in one:
                self.scores[key] = _number(one["score"])

    def key(self, settings: Settings) -> Key:
        return tuple(float(settings[axis]) for axis in self.axes)

    def jobs(self) -> list[Job]:
        """The next runs: settings of the grid, the best of these for longer, neighbours of the best, or its seeds."""
        grid = list(itertools.product(*self.axes.values()))
        if missing := [one for one in grid if one not in self.screened]:
            return [self.trial(one, self.screen) for one in missing]
        finalists = sorted(self.screened, key=lambda one: -self.screened[one])[:FINALISTS]
        if longer := [one for one in finalists if one not in self.scores and self.screened[one] > -math.inf]:
            return [self.trial(one, self.config.rounds) for one in longer]
        best, added = self.best().settings, len(self.screened) - len(grid)
        beside = [one for one in self.neighbours(self.key(best)) if one not in self.screened]
        if beside and added < MOST:
            return [self.trial(one, self.screen) for one in beside]
        tree = with_method(self.config, self.name).model_dump()
        tree["algorithm"] |= best
        seeds = range(3) if self.final_rounds else ()
        finals = [check({**tree, "seed": seed, "rounds": self.final_rounds}) for seed in seeds]
        return [Job(one, self.folder / "runs" / self.name / f"seed-{one.seed}") for one in finals]

    def neighbours(self, key: Key) -> list[Key]:
        """The settings one step away in one rate."""
        found = []
        for place, axis in enumerate(self.axes):
            values = sorted({*self.axes[axis], *(one[place] for one in self.screened)})
            if axis not in RATES or len(values) < 2:
                continue
            below, above = float(f"{values[0] ** 2 / values[1]:.2g}"), float(f"{values[-1] ** 2 / values[-2]:.2g}")
            values = [below, *values, above]
            at = values.index(key[place])
            found += [(*key[:place], values[at + step], *key[place + 1 :]) for step in (-1, 1)]
        return found

    def best(self) -> Choice:
        return choose(self.name, [(self.settings(one), self.scores[one]) for one in sorted(self.scores)])

    def settings(self, key: Key) -> Settings:
        return dict(zip(self.axes, key, strict=True))

    def trial(self, key: Key, rounds: int) -> Job:
        """A run of the grid, as `fedlalr compare --grid` does it."""
        settings = self.settings(key)
        tree = with_method(self.config, self.name, seed=FIRST_SEED).model_dump()
        tree["data"] |= {"validation": VALIDATION}
        tree["algorithm"] |= settings
        name = as_file_name(",".join(f"{option}={value:g}" for option, value in settings.items()))
        folder = self.folder / "grid" / self.name / name / f"seed-{FIRST_SEED}"
        return Job(check({**tree, "rounds": rounds}), folder)

    def add(self, job: Job) -> None:
        """Take over the score of a finished run of the grid."""
        rounds, key = job.config.rounds, self.key(job.config.algorithm.options)
        found = score([qualities(job.directory.records(), by_loss=False)], rounds)
        if rounds == self.screen:
            self.screened[key] = found
        if rounds == self.config.rounds:
            self.scores[key] = found

    def as_dict(self) -> dict[str, Any]:
        screening = self.screen < self.config.rounds
        tried = []
        for key in sorted(self.screened):
            screened = {"screened": _plain(self.screened[key])} if screening else {}
            scored = {"score": _plain(self.scores[key])} if key in self.scores else {}
            tried.append({**self.settings(key), **screened, **scored})
        if not any(found > -math.inf for found in self.scores.values()):
            return {"chosen": None, "tried": tried}
        best = self.best()
        return {"chosen": best.settings, "score": best.score, "tried": tried}


def _number(score: float | None) -> float:
    return -math.inf if score is None else score


def _plain(score: float) -> float | None:
    """For JSON, which has no infinity."""
    return score if score > -math.inf else None


def lengthen(job: Job) -> None:
    """Let a finished run of fewer rounds be resumed."""
    if job.directory.holds_run and not changes(job, ignored={"rounds"}):
        job.directory.write_config(job.config)


def run(methods: list[Method], workers: int, seconds: float, file: Path) -> None:
    """Run everything that the methods ask for: the next runs of all methods at once, again and again."""
    begun, left = time.monotonic(), methods

    def show(event: Event) -> None:
        if event.over is not None and event.summary is not None:
            print(f"{time.monotonic() - begun:5.0f} s", event.over.folder, event.summary["accuracy"], flush=True)

    while left and time.monotonic() - begun < seconds:
        jobs = {method.name: method.jobs() for method in left}
        for job in itertools.chain.from_iterable(jobs.values()):
            if finished(job) is None:
                lengthen(job)
        run_jobs(list(itertools.chain.from_iterable(jobs.values())), workers, show)
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
    parser.add_argument("--screen", type=int)
    parser.add_argument("--final-rounds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    arguments = parser.parse_intermixed_args()
    settings = load(arguments.config, arguments.overrides)
    scores = arguments.folder / "grid.json"
    stored = json.loads(scores.read_text()) if scores.is_file() else {}
    names = arguments.methods.split(",") if arguments.methods else list(settings.grid)
    run(
        [
            Method(name, settings, arguments.folder, stored.get(name, {}), arguments.screen, arguments.final_rounds)
            for name in names
        ],
        arguments.jobs,
        arguments.seconds,
        scores,
    )
