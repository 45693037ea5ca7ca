"""Every figure of the paper and our own: its files and verdicts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from fedlalr.common.files import write_whole
from fedlalr.config.errors import ConfigError
from fedlalr.config.jobs import Job
from fedlalr.federation.storage.journal import versions
from fedlalr.paper import claims, claims_measured, heterogeneity, open_choices, plans, plots, speedup, speedup_figure
from fedlalr.paper.curve_measures import Numbers, summary
from fedlalr.paper.curves import PanelCurves, collect, over, write_curves, write_trajectories
from fedlalr.paper.plans import FigurePlan, Request
from fedlalr.paper.speedup_results import Speedup
from fedlalr.paper.style import save
from fedlalr.paper.verdicts import Claim
from fedlalr.training.machine import hardware

Plan = Callable[[Request], FigurePlan]
Draw = Callable[[Sequence[PanelCurves], Sequence[str]], Figure]
Judge = Callable[[Sequence[PanelCurves]], list[Claim]]
_FIGURES: dict[str, tuple[Plan, Draw, Judge | None]] = {
    "cifar": (plans.cifar, plots.accuracy_figure, claims.cifar_claims),
    "shakespeare": (plans.shakespeare, plots.shakespeare_figure, claims.shakespeare_claims),
    "scalability": (plans.scalability, plots.scalability_figure, claims.scalability_claims),
    "interval": (plans.interval, plots.interval_figure, claims.interval_claims),
    "trajectory": (plans.trajectory, plots.trajectory_figure, claims_measured.trajectory_claims),
    "choices": (open_choices.choices, plots.choices_figure, None),
    "variants": (open_choices.variants, plots.variants_figure, None),
}
"""The figures drawn from runs: how each is planned, drawn and, if the paper makes a claim about it, judged."""


@dataclass(frozen=True)
class Drawn:
    """A figure and its files."""

    figure: str
    files: tuple[Path, ...]
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    runs: tuple[dict[str, Any], ...] = ()
    planned: tuple[str, ...] = ()
    """Runs of the figure that are not finished."""
    numbers: tuple[Numbers, ...] = ()
    """The curves of a figure without a claim."""
    lacks: Literal["data", "runs"] | None = None
    """Why there are no files."""
    seconds: float = 0.0
    """The time this measurement took, for a figure that trains nothing."""


def plan_of(figure: str, request: Request) -> FigurePlan | None:
    """The runs of a figure; None for those that train nothing."""
    return _FIGURES[figure][0](request) if figure in _FIGURES else None


def draw_runs(plan: FigurePlan, folder: Path, runs: Path, seeds: int) -> Drawn:
    """Draw and judge the available runs of a figure. Without any, nothing is drawn."""
    every = plan.jobs(runs, seeds)
    ready = [job for job in every if over(job)]
    planned = tuple(str(job.folder.relative_to(runs)) for job in every if job not in ready)
    results = collect(plan, ready, runs, seeds)
    _, draw, judge = _FIGURES[plan.figure]
    judged = tuple(judge(results)) if judge else ()
    if not any(result.lines for result in results):
        return Drawn(plan.figure, (), judged, plan.notes, planned=planned, lacks="runs" if results else "data")
    pictures = save(lambda: draw(results, plan.notes), folder / plan.figure)
    table = folder / f"{plan.figure}.csv"
    write = write_trajectories if plan.figure == "trajectory" else write_curves
    write(results, table)
    facts = tuple(_facts(job, runs) for job in ready)
    numbers = () if judge else tuple(summary(results))
    return Drawn(plan.figure, (*pictures, table), judged, plan.notes, facts, planned, numbers)


def draw_heterogeneity(request: Request, folder: Path, seeds: int) -> Drawn:
    dealt, notes = heterogeneity.deal(request, seeds)
    labels = heterogeneity.labels_by_alpha(dealt)
    judged = claims_measured.heterogeneity_claims(labels, sorted({one.seed for one in dealt}))
    files: list[Path] = []
    if dealt:
        files += save(lambda: heterogeneity.label_figure(dealt, notes), folder / "heterogeneity")
        files.append(heterogeneity.write_labels(dealt, folder / "heterogeneity.csv"))
    return Drawn("heterogeneity", tuple(files), tuple(judged), tuple(notes), lacks=None if dealt else "data")


def measure_speedup(scale: str, folder: Path, repeats: int, advance: Callable[[int], None]) -> Drawn:
    """Measure the points of the speed-up that its file lacks, and draw it."""
    wanted, start = replace(speedup.SCALES[scale], repeats=repeats), time.perf_counter()
    result = speedup.measure(wanted, folder=folder, advance=advance)
    return replace(draw_speedup(result, folder), seconds=time.perf_counter() - start)


def draw_speedup(result: Speedup, folder: Path) -> Drawn:
    """Draw and judge the measured speed-up."""
    judged = tuple(claims_measured.speedup_claims(result))
    if not result.points:
        return Drawn("speedup", (), judged, (), lacks="runs")
    pictures = save(lambda: speedup_figure.speedup_figure(result), folder / "speedup")
    files = [*result.write(folder), *pictures]
    return Drawn("speedup", tuple(files), judged, tuple(speedup_figure.notes(result)))


def write_provenance(drawn: Drawn, folder: Path, scale: str, command: str, draw_only: bool) -> Path:
    """Write the provenance of a figure: the commands of its runs, their times, engines, hardware and versions, and how
    it was drawn.

    Drawing alone does not change what is known about the runs; unknown values are null.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{drawn.figure}.json"
    known = _known(path)
    here = {"command": command, "hardware": hardware("cpu"), "versions": versions()}
    ran = {name: known.get(name) for name in ("commands", "hardware", "versions")}
    if not draw_only:
        names = dict.fromkeys(run["hardware"] for run in drawn.runs if run["hardware"])
        with_versions = [run["versions"] for run in drawn.runs if run["versions"]]
        ran = {
            "commands": list(dict.fromkeys([*(ran["commands"] or []), command])),
            "hardware": ", ".join(names) or here["hardware"],
            "versions": with_versions[-1] if with_versions else here["versions"],
        }
    measured = (known.get("run_seconds") or 0.0) + (0.0 if draw_only else drawn.seconds)
    plain = {
        "figure": drawn.figure,
        "scale": scale,
        **ran,
        "drawn": here,
        "notes": drawn.notes,
        "run_seconds": sum(run.get("seconds") or 0.0 for run in drawn.runs) if drawn.runs else measured,
        "runs": drawn.runs,
        "planned": {"command": running(command), "runs": drawn.planned},
    }
    write_whole(path, json.dumps(plain, indent=1, ensure_ascii=False) + "\n")
    return path


def running(command: str) -> str:
    """The command that runs what a command only draws, on a GPU.

    >>> running("fedlalr reproduce interval --draw-only --seeds 3")
    'fedlalr reproduce interval --device cuda --seeds 3'
    """
    return command.replace("--draw-only", "--device cuda")


def _known(path: Path) -> dict[str, Any]:
    """The recorded provenance of a figure."""
    try:
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); move it away, and it will be rewritten") from error
    return known if isinstance(known, dict) else {}


def _facts(job: Job, runs: Path) -> dict[str, Any]:
    """The facts of a finished run."""
    wanted = ("status", "failure", "rounds", "accuracy", "seconds", "engine", "device", "hardware", "versions")
    summary = job.directory.summary() or {}
    return {"run": str(job.folder.relative_to(runs)), **{name: summary.get(name) for name in wanted}}
