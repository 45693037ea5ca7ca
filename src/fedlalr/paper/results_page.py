"""The generated tables of the pages on results, and two figures: `python -m fedlalr.paper.results_page docs/results`.

Reads the verdicts, the planned runs and all finished runs below a folder, and rewrites every part of its `README.md`
and `details.md` that stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. Draws the accuracy of the families
in `DRAWN`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedlalr.algorithms import registry
from fedlalr.common.files import write_whole
from fedlalr.config.errors import ConfigError
from fedlalr.paper.verdicts import Claim, load_verdicts
from fedlalr.report.comparison import Curve
from fedlalr.report.figures import accuracy_figure
from fedlalr.report.groups import Group, group_runs, method_of
from fedlalr.report.runs import ReportedRun, read_run, runs_below
from fedlalr.report.tables import counted

PAGES = ("README.md", "details.md")
NO_RUN = "no run yet"


@dataclass(frozen=True)
class Family:
    """A kind of model on some data: where its runs are, and the accuracy that rounds and bytes are counted to."""

    name: str
    folder: str
    target: float
    buffers: str | None = None


_PRINTED = "paper-dtype-bfloat16/runs"
FAMILIES = (
    Family("ConvMixer, CIFAR-10, Dirichlet 0.6", f"{_PRINTED}/cifar10-dirichlet0.6-50of100", 0.75, "average"),
    Family("ConvMixer, CIFAR-10, Dirichlet 0.3", f"{_PRINTED}/cifar10-dirichlet0.3-50of100", 0.75, "average"),
    Family("ConvMixer, 0.6, 10 of 100 clients", "cohorts/10of100", 0.70),
    Family("ConvMixer, 0.6, 2 of 100 clients", "cohorts/2of100", 0.70),
    Family("ConvMixer, Dirichlet 0.1", "cifar-variations/dirichlet0.1", 0.70),
    Family(
        "ConvMixer, 0.6, BatchNorm recalibrated",
        "paper-buffers-recalibrate-dtype-bfloat16/runs/cifar10-dirichlet0.6-50of100",
        0.75,
    ),
    Family(
        "ConvMixer, 0.3, BatchNorm recalibrated, 40 rounds", "cifar-variations/recalibrated/partition.alpha-0.3", 0.75
    ),
    Family("LSTM, Shakespeare by role", f"{_PRINTED}/shakespeare-natural-10of100", 0.40),
    Family("LSTM, Shakespeare by role, equally tuned", "shakespeare-equal/runs", 0.40),
    Family("GPT of 0.8 million parameters, Shakespeare by role", "gpt/runs", 0.33),
    Family("GPT of 4.8 million parameters, Shakespeare by role", "gpt-larger/runs", 0.33),
    Family("LoRA on a GPT of 0.8 million parameters, 40 rounds on a CPU", "lora-cpu", 0.37),
    Family("ViT, CIFAR-10, Dirichlet 0.6, 30 rounds", "vit/runs", 0.35),
    Family("ViT, CIFAR-10, Dirichlet 0.6, 30 rounds, with a warm-up", "vit-variants/warmup", 0.35),
)
DRAWN = ("gpt-larger/runs", "vit/runs")
"""The folders of the families whose accuracy is drawn against rounds and bytes, beside the folder."""
FURTHER = Family("ConvMixer, 0.6, further methods, 50 rounds", "cifar-variations/references", 0.75)
SECONDS = "seconds.json"
"""Seconds of a round by folder of runs, by benchmarks/round_seconds.py."""


@dataclass(frozen=True)
class Line:
    """One method with one set of settings over its seeds."""

    label: str
    seeds: int
    final: float
    """Mean accuracy over the last tenth of the rounds, and over the seeds."""
    rounds: float
    """To the target, as a mean over the seeds; infinite if one of them does not reach it."""
    gigabytes: float
    """Sent up by all clients until then."""


def main(arguments: Sequence[str]) -> None:
    """Rewrite the pages of the folder that is named on the command line."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise SystemExit("usage: python -m fedlalr.paper.results_page FOLDER, with a folder such as docs/results")
    for path in (*write_pages(Path(arguments[0])), *draw_figures(Path(arguments[0]))):
        print(path)


def write_pages(folder: Path) -> list[Path]:
    """Rewrite the generated parts of both pages; returns their paths."""
    parts: dict[str, Callable[[], str]] = {
        "claims": lambda: claims_table(find_claims(folder)),
        "planned": lambda: planned_list(folder),
        "recommended": lambda: recommended_table(folder),
        "seconds": lambda: seconds_tables(folder),
    }
    written = []
    for page in PAGES:
        path = folder / page
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"<!-- begin (\w+) -->", text):
            if name not in parts:
                raise ConfigError(f"{path} asks for the part {name!r}; there are only {', '.join(parts)}")
            begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
            before, _, rest = text.partition(begin)
            _, found, after = rest.partition(end)
            if not found:
                raise ConfigError(f"{path} has {begin} without {end}; add it where the generated part ends")
            text = f"{before}{begin}\n\n{parts[name]()}\n\n{end}{after}"
        write_whole(path, text)
        written.append(path)
    return written


def draw_figures(folder: Path) -> list[Path]:
    """Draw the families in `DRAWN` that have runs; returns the paths of the figures."""
    drawn = []
    for family in (family for family in FAMILIES if family.folder in DRAWN and (folder / family.folder).is_dir()):
        groups = _groups(folder / family.folder, family.buffers)
        curves = {group.runs[0].path.parent.name: [Curve(run.records) for run in group.runs] for group in groups}
        title = f"{family.name}: mean and range of {max(map(len, curves.values()))} seeds"
        image, vector = accuracy_figure(curves, (folder / family.folder).with_name("accuracy"), title, family.target)
        vector.unlink()
        drawn.append(image)
    return drawn


def find_claims(folder: Path) -> list[Claim]:
    """Each claim from the folder that measured it, in the order of the paper; from the first if several did."""
    found: dict[str, Claim] = {}
    for file in sorted(folder.glob("*/verdicts.json"), key=lambda file: "recalibrate" in file.parent.name):
        for claim in load_verdicts(file.parent):
            if claim.key not in found or not found[claim.key].checks:
                found[claim.key] = claim
    return list(found.values())


def claims_table(claims: Iterable[Claim]) -> str:
    """Claim, verdict, verdict of the second reading, and one number."""
    lines = ["| claim of the paper | verdict | tuned, or in steps | one number |", "|---|---|---|---|"]
    for claim in claims:
        told = [_marked(claim, reading) for reading in claim.readings or ("",)]
        lines.append(f"| {claim.key}. {claim.text} | {told[0]} | {told[1] if told[1:] else ''} | {one_number(claim)} |")
    return "\n".join(lines)


def _marked(claim: Claim, reading: str) -> str:
    """A verdict, bold if several seeds decide it, with a star if one does; that of every panel if one holds and another
    is undecided, or if one was not run."""
    outcome, one_seed = claim.outcome(reading), claim.one_seed(reading)
    panels = {
        place: Claim(claim.key, tuple(check for check in claim.of(reading) if check.where == place))
        for place in dict.fromkeys(check.where for check in claim.of(reading))
    }
    ran = {place: part for place, part in panels.items() if part.outcome(reading) != "not measured"}
    if not ran:
        return "not run"
    some_hold = any(part.outcome(reading) == "holds" for part in ran.values())
    if outcome == "not measured" or (outcome == "undecided" and some_hold):
        return ", ".join(f"{_marked(part, reading)} at {place.rpartition(', ')[2]}" for place, part in ran.items())
    if one_seed:
        return f"{outcome}\\*"
    return outcome if outcome == "undecided" else f"**{outcome}**"


def one_number(claim: Claim) -> str:
    """The number behind the verdict of the first reading that was measured."""
    for reading in claim.readings:
        outcome, checks = claim.outcome(reading), claim.of(reading)
        if outcome == "not measured":
            continue
        if all(check.window for check in checks):
            held = sum(check.outcome == "holds" for check in checks)
            return f"{held} of {len(checks)} windows"
        deciding = next((check for check in checks if check.outcome == outcome), checks[0])
        return deciding.number or deciding.measured
    return "–"


def planned_list(folder: Path) -> str:
    """The commands of runs that are planned and not finished, with their number."""
    lines = []
    for file in sorted(folder.glob("*/*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        planned = content.get("planned") if isinstance(content, dict) else None
        if planned and planned["runs"]:
            count = len(planned["runs"])
            lines.append(f"# {content['figure']}: {counted(count, 'run')}\n{planned['command']}")
    return "```sh\n" + "\n".join(lines) + "\n```" if lines else "Nothing: all planned runs are finished."


def recommended_table(folder: Path) -> str:
    """For every family the method with the best final accuracy, the fewest rounds and the fewest bytes."""
    lines = [
        "| model and data | best accuracy | fewest rounds | fewest bytes up | compression |",
        "|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        found = lines_of(folder / family.folder, family.target, family.buffers)
        cells = [NO_RUN] * 3
        if found:
            reached = [line for line in found if math.isfinite(line.rounds)]
            best = max(found, key=lambda line: line.final)
            cells = [f"{best.label}: {best.final * 100:.1f} %{_seeds(best)}", *["–"] * 2]
        if found and reached:
            target = f"{family.target * 100:g} %"
            soon = _first(reached, lambda line: (round(line.rounds), -line.seeds, line.rounds, line.gigabytes))
            cheap = _first(reached, lambda line: (line.gigabytes, -line.seeds))
            cells[1] = f"{_labels(soon)}: {target} in round {soon[0].rounds:.0f}{_seeds(soon[0])}"
            cells[2] = f"{_labels(cheap)}: {_bytes(cheap[0].gigabytes)} to {target}{_seeds(cheap[0])}"
        lines.append(f"| {family.name} | {' | '.join(cells)} | {compressed(folder / family.folder, family.buffers)} |")
    return "\n".join(lines)


def compressed(folder: Path, buffers: str | None = None) -> str:
    """The runs that saved most by compression, against those with the same settings and seeds without it.

    Both up to the last round that both have, with the accuracy of the last ten of these.
    """
    groups = _groups(folder, buffers)
    labels = {label_of(group.runs[0]): group for group in groups}
    found = []
    for label, group in labels.items():
        form = group.runs[0].config.compression if group.runs[0].config else None
        plain = labels.get(label.replace(f" ({form})", "")) if isinstance(form, str) else None
        if plain is None:
            continue
        pairs = [(Curve(a.records), Curve(b.records)) for a in group.runs for b in plain.runs if a.seed == b.seed]
        shares, gains = [], []
        for small, large in pairs:
            n = min(len(small.records), len(large.records))
            shares.append(small.megabytes(down=False)[n - 1] / large.megabytes(down=False)[n - 1])
            gains.append(np.mean(small.accuracies[max(0, n - 10) : n]) - np.mean(large.accuracies[max(0, n - 10) : n]))
        if pairs:
            found.append((float(np.mean(shares)), label, form, float(np.mean(gains)), len(pairs)))
    if not found:
        return NO_RUN
    share, label, form, gain, seeds = min(found)
    change = f"{gain * 100:+.1f}".replace("-", "−") if abs(gain) >= 0.0005 else "0.0"
    method = label.partition(" (")[0]
    tried = "one seed" if seeds == 1 else f"{seeds} seeds"
    return f"{method} `{form}`: {share:.2f} of the bytes up, {change} points, {tried}"


def seconds_tables(folder: Path) -> str:
    """For every family a table of the methods whose rounds were timed: accuracy, rounds, bytes and seconds.

    Of runs in one folder with different settings, those with the most seeds count.
    """
    timed = json.loads((folder / SECONDS).read_text(encoding="utf-8"))
    tables = []
    for family in (*FAMILIES, FURTHER):
        groups = sorted(_groups(folder / family.folder, family.buffers), key=lambda group: len(group.runs))
        found = {group.runs[0].path.parent.relative_to(folder).as_posix(): group for group in groups}
        rows = [
            (_line(group, family.target), timed[place]["seconds"]) for place, group in found.items() if place in timed
        ]
        if rows:
            tables.append(_seconds_table(family, sorted(rows, key=lambda row: -row[0].final)))
    return "\n\n".join(tables)


def _seconds_table(family: Family, rows: Iterable[tuple[Line, float]]) -> str:
    goal = f"{family.target * 100:g} %"
    lines = [
        f"| {family.name} | last tenth | {goal} in round | sent up by then | seconds a round | seconds to {goal} |",
        "|---|---|---|---|---|---|",
    ]
    for line, seconds in rows:
        until = ["never", "–", "–"]
        if math.isfinite(line.rounds):
            until = [f"{line.rounds:.0f}", _bytes(line.gigabytes), f"{line.rounds * seconds:.3g}"]
        cells = [*until[:2], f"{seconds:.3g}", until[2]]
        lines.append(f"| {line.label} | {line.final * 100:.1f} %{_seeds(line)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def lines_of(folder: Path, target: float, buffers: str | None = None) -> list[Line]:
    """The finished runs below a folder, grouped by their settings; empty without any."""
    return [_line(group, target) for group in _groups(folder, buffers)]


def _groups(folder: Path, buffers: str | None) -> list[Group]:
    """The finished runs below a folder over their seeds. Seeds of one method ran before and after the default of
    `max_norm_ratio` changed; the pages say where that matters."""
    found = []
    for place in runs_below(folder):
        run = read_run(place)
        if run.state == "finished" and run.config is not None and buffers in (None, run.config.buffers):
            found.append(replace(run, config=run.config.model_copy(update={"max_norm_ratio": None})))
    return group_runs(found)


def _line(group: Group, target: float) -> Line:
    curves = [Curve(run.records) for run in group.runs]
    firsts = [(curve, curve.first_at(target)) for curve in curves]
    finals = [np.nan_to_num(curve.accuracies)[-max(1, len(curve.records) // 10) :].mean() for curve in curves]
    rounds = [math.inf if at is None else at + 1 for _, at in firsts]
    sent = [math.inf if at is None else curve.megabytes(down=False)[at] / 1000 for curve, at in firsts]
    return Line(label_of(group.runs[0]), len(group.runs), *(float(np.mean(each)) for each in (finals, rounds, sent)))


def label_of(run: ReportedRun) -> str:
    """The method with its rates, and with what else its folder is named after."""
    assert run.config is not None  # lines_of keeps only such runs
    method, usual = run.config.algorithm, registry.create(run.config.algorithm.name)
    named = {name: method.options[name] for name in ("lr", "server_lr", "align") if name in method.options}
    rates = [
        f"{name.replace('_', ' ')} {value:g}"
        for name, value in named.items()
        if not (name == "server_lr" and value == usual.server_lr == 1)  # type: ignore[attr-defined]
    ]
    folder = run.path.parent.name
    more = folder.removeprefix(method.name).lstrip("+-").removeprefix(str(run.config.compression))
    more = re.sub(r"((server_)?lr|align)-[\d.]+(e-?\d+)?", "", more).strip("-").replace("-", " ").replace("_", " ")
    return ", ".join([method_of(run), *rates, *([more] if more else [])])


def _first(lines: Sequence[Line], order: Callable[[Line], tuple[float, ...]]) -> list[Line]:
    """The first in some order, and those that equal it."""
    least = min(map(order, lines))
    return [line for line in lines if order(line) == least]


def _labels(lines: Iterable[Line]) -> str:
    return " or ".join(line.label for line in lines)


def _seeds(line: Line) -> str:
    """A note on fewer than three seeds, which most runs have."""
    return {1: ", one seed", 2: ", two seeds"}.get(line.seeds, "")


def _bytes(gigabytes: float) -> str:
    """
    >>> _bytes(3.42), _bytes(0.027)
    ('3.4 GB', '27 MB')
    """
    return f"{gigabytes:.1f} GB" if gigabytes >= 1 else f"{gigabytes * 1000:.0f} MB"


if __name__ == "__main__":
    main(sys.argv[1:])
