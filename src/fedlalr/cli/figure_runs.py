"""Executes the runs behind the figures of the paper, and draws them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fedlalr.cli.errors import hint_to_repeat
from fedlalr.cli.progress import GridProgress, fetch_progress
from fedlalr.config.jobs import Job, run_jobs
from fedlalr.data import sources
from fedlalr.paper import figures
from fedlalr.paper.curves import over
from fedlalr.paper.plans import CIFAR, FigurePlan, Request
from fedlalr.paper.settings import TITLES
from fedlalr.paper.speedup import SCALES
from fedlalr.paper.speedup_results import Speedup
from fedlalr.paper.verdicts import save_verdicts

NEEDS = {
    **dict.fromkeys(("heterogeneity", "cifar", "scalability", "interval"), CIFAR),
    **dict.fromkeys(("trajectory", "choices", "variants"), CIFAR[:1]),
    "shakespeare": ("shakespeare",),
}
"""Data sets used in the paper."""
REPEATS = 5
"""Minimum number of repetitions of the speed-up, which is cheap."""


@dataclass
class FigureRuns:
    """Executes the runs of figures and draws the figures one by one."""

    request: Request
    folder: Path
    seeds: int
    methods: Sequence[str]
    workers: int
    console: Console
    quiet: bool
    draw_only: bool
    broken: dict[str, str] = field(default_factory=dict)
    """Runs that ended in an unexpected error. These errors are not saved: the next call tries the runs again."""

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def draw(self, names: Sequence[str], command: str) -> list[figures.Drawn]:
        """Run and draw figures, and write the provenance and the verdicts of each as soon as it is drawn."""
        drawn = []
        for one in self._figures(names):
            drawn.append(one)
            if one.files:
                figures.write_provenance(one, self.folder, self.request.scale, command, self.draw_only)
                save_verdicts(one.claims, self.request.verdict_scope, self.folder)
        return drawn

    def _figures(self, names: Sequence[str]) -> Iterable[figures.Drawn]:
        """Yield each figure as soon as its runs are complete, with one progress display."""
        plans = {name: figures.plan_of(name, self.request) for name in names}
        jobs = {job.folder: job for plan in plans.values() for job in self._jobs(plan)}
        missing = [job for job in jobs.values() if not over(job)]
        if not self.quiet and jobs:
            self.console.print(f"{len(jobs) - len(missing)} of {len(jobs)} runs are complete")
        missing = [] if self.draw_only else missing
        with GridProgress(self.console, missing, self.runs, self.quiet) as progress:
            for name, plan in plans.items():
                if plan is not None:
                    self._run([job for job in self._jobs(plan) if job in missing], progress)
                    yield figures.draw_runs(plan, self.folder, self.runs, self.seeds)
                elif name == "heterogeneity":
                    yield figures.draw_heterogeneity(self.request, self.folder, self.seeds)
        if "speedup" in names:
            yield self._speedup()

    def _jobs(self, plan: FigurePlan | None) -> list[Job]:
        return [] if plan is None else plan.jobs(self.runs, self.seeds, self.methods)

    def _run(self, jobs: Sequence[Job], progress: GridProgress) -> None:
        waiting = [job for job in jobs if job.folder not in progress.over]  # another figure may have run them
        with hint_to_repeat():
            run_jobs(waiting, self.workers, progress.show, keep_going=True)
        self.broken |= {str(folder.relative_to(self.runs)): reason for folder, reason in progress.failed.items()}

    def _speedup(self) -> figures.Drawn:
        if self.draw_only:
            return figures.draw_speedup(Speedup.read(self.folder), self.folder)
        shown = self.console.is_terminal and not self.quiet
        if not shown and not self.quiet:
            self.console.print("speed-up: measuring on a synthetic problem")
        with Progress(console=self.console, transient=True, disable=not shown) as bar:
            task = bar.add_task("speed-up", total=SCALES[self.request.scale].work)
            return figures.measure_speedup(
                self.request.scale, self.folder, max(REPEATS, self.seeds), lambda steps: bar.advance(task, steps)
            )


def find_data(figures: Sequence[str], fetching: bool, console: Console, quiet: bool) -> frozenset[str]:
    """The data sets on this machine, after fetching those that the figures need."""
    here = {data.name for data in sources.available() if data.where is not None}
    wanted = dict.fromkeys(name for figure in figures for name in NEEDS.get(figure, ()))
    for name in wanted if fetching else ():
        if name not in here:
            try:
                with fetch_progress(console, quiet) as progress:
                    sources.fetch(name, progress=progress)
                here.add(name)
            except sources.DataNotFound as error:
                if not quiet:
                    console.print(f"{name} cannot be fetched and is skipped: {error}")
    return frozenset(here)


def data_of_runs(runs: Path) -> frozenset[str]:
    """The data sets of existing runs: drawing these does not need the data."""
    return frozenset(name for name in TITLES if any(runs.glob(f"{name}-*")))
