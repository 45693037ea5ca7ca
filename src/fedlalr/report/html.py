"""The HTML page: one self-contained file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from fedlalr.common.files import write_whole
from fedlalr.config import dump
from fedlalr.report import sections
from fedlalr.report.client_quality import clients_of, clients_table
from fedlalr.report.groups import Group, curves_of, group_runs
from fedlalr.report.line_styles import dash_arrays, looks_of
from fedlalr.report.partitions import PartitionView, view_partitions
from fedlalr.report.rerun_command import command_for, description_of, stored_command
from fedlalr.report.runs import ReportedRun, find_runs, read_run
from fedlalr.report.tables import Table, counted
from fedlalr.report.trajectories import trajectories_of

PERCENT = "\N{NO-BREAK SPACE}%"
MOST_DRAWN_CLIENTS = 200
"""Columns of a partition's map; more would be narrower than a pixel on a phone."""
MOST_NAMED = 3
"""The most groups whose labels are listed under the title."""
LINE_WIDTH = 2
"""The same as in `page.css`."""
FROM_PYTHON = "To repeat a run that was started from Python, run its program again."
ELSEWHERE = (
    "If that directory is not available, save the configuration of the run, above, as a new file, and run it "
    "with the run's seed: fedlalr run NEW.yaml seed=N."
)


def write_report(places: Iterable[str | Path], output: str | Path) -> Path:
    """Write the report of some run directories, or of those below them. The same runs give the same bytes."""
    output = Path(output)
    runs = [read_run(path) for path in find_runs(places)]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, page(runs))
    return output


def page(
    runs: Sequence[ReportedRun],
    *,
    partitions: Sequence[PartitionView] | None = None,
    live: bool = False,
    notes: Sequence[str] = (),
) -> str:
    """The page as text. A live one requests itself again and shows what has changed."""
    groups = group_runs(runs)
    partitions = view_partitions(runs) if partitions is None else partitions
    script = "".join(map(_asset, ("chart.js", "page.js", *(["live.js"] if live else []))))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template(_asset("page.html")).substitute(
        title=escape(_title(groups)),
        subtitle=escape(_subtitle(groups)),
        style=_asset("page.css"),
        script=script,
        script_hash=digest,
        connect="; connect-src 'self'" if live else "",
        notes=("<p class='note' id='live'></p>" if live else "")
        + "".join(f"<p class='note'>{escape(note)}</p>" for note in notes),
        data=_json(_drawn(groups, partitions)),
        runs=_table(sections.runs_table(groups)),
        comparison=_table(sections.comparison_section(groups), title="<h3>Methods compared</h3>"),
        clients=_table(clients_table(groups), "<p>The clients were not evaluated; to do so, set holdout=0.2.</p>"),
        configuration=_configuration(groups),
        partitions="".join(map(_partition, partitions))
        or "<p>The runs have no configuration to recompute it from.</p>",
        rejections=_table(sections.rejections_table(groups), "<p>No reply was rejected.</p>"),
        timing=_table(sections.timing_table(groups)),
        reproduction=_reproduction(groups),
    )


def _drawn(groups: Sequence[Group], partitions: Sequence[PartitionView]) -> dict[str, Any]:
    """The data that the scripts draw."""
    trajectories = [
        trajectories_of(run, f"{group.label}, {'seed ' + str(run.seed) if run.seed is not None else run.path}")
        for group in groups
        for run in group.runs
    ]
    looks = looks_of([group.method for group in groups])

    def with_looks(lines_of: Callable[[Group], dict[str, Any] | None]) -> list[dict[str, Any]]:
        found = [(look, lines_of(group)) for group, look in zip(groups, looks, strict=True)]
        return [{"look": look, **lines} for look, lines in found if lines is not None]

    return {
        "runs": sum(len(group.runs) for group in groups),
        "dashes": dash_arrays(LINE_WIDTH),
        "curves": with_looks(curves_of),
        "clients": with_looks(clients_of),
        "trajectories": [found for found in trajectories if found is not None],
        "partitions": [
            {"label": view.label, "clients": len(view.counts), "counts": view.counts[:MOST_DRAWN_CLIENTS].tolist()}
            for view in partitions
            if view.counts is not None
        ],
    }


def _title(groups: Sequence[Group]) -> str:
    names = list(dict.fromkeys(run.config.name for group in groups for run in group.runs if run.config))
    return ", ".join(names) or "Runs"


def _subtitle(groups: Sequence[Group]) -> str:
    description = description_of(run.config for group in groups for run in group.runs if run.config)
    words = [description, _named(groups), counted(sum(len(group.runs) for group in groups), "run")]
    return "; ".join(filter(None, words))


def _named(groups: Sequence[Group]) -> str:
    """The labels of a few groups; for many groups the methods, or their number, and the number of variants."""
    if len(groups) <= MOST_NAMED:
        return " · ".join(group.label for group in groups)
    methods = list(dict.fromkeys(group.method for group in groups))
    named = " · ".join(methods) if len(methods) <= MOST_NAMED else counted(len(methods), "method")
    return named if len(methods) == len(groups) else f"{named} in {len(groups)} variants"


def _configuration(groups: Sequence[Group]) -> str:
    parts = [_table(sections.settings_table(groups))]
    if len(groups) > 1:
        parts.insert(0, "<p>Settings that differ:</p>")
        parts.append(_folded("Settings that are the same for all", _table(sections.shared_table(groups))))
    for group in groups:
        if (config := group.runs[0].config) is not None:
            seed = f"{group.label}, seed {config.seed}" if len(groups) > 1 or len(group.runs) > 1 else "this run"
            parts.append(_folded(f"config.yaml of {seed}", f"<pre tabindex='0'>{escape(dump(config))}</pre>"))
    from_python = [group.label for group in groups if group.runs[0].config is None]
    if from_python:
        which = ", ".join(from_python) if len(groups) > 1 else "This run"
        told = f"{which}: started from Python; the table shows what the checkpoint recorded."
        parts.append(f"<p>{escape(told)}</p>")
    return "".join(parts)


def _partition(view: PartitionView) -> str:
    words = view.facts or (view.missing,)
    return (
        f"<h3>{escape(view.label)}</h3><ul class='facts'>{''.join(f'<li>{escape(line)}</li>' for line in words)}</ul>"
    )


def _reproduction(groups: Sequence[Group]) -> str:
    commands: list[str] = []
    notes: dict[str, None] = {}
    for run in (run for group in groups for run in group.runs):
        if run.config is None:
            notes[FROM_PYTHON] = None
        elif (command := command_for(run.config)) is not None:
            commands.append(command)
        elif (command := stored_command(run.config, run.path)) is not None:
            commands.append(command)
            notes[ELSEWHERE] = None
        else:
            notes[f"{run.path} no longer has the configuration of its run. {ELSEWHERE}"] = None
    notes |= {machine: None for group in groups for run in group.runs if (machine := _machine(run))}
    shown = f"<pre tabindex='0' id='commands'>{escape(chr(10).join(commands))}</pre>" if commands else ""
    return shown + "".join(f"<p>{escape(note)}</p>" for note in notes)


def _machine(run: ReportedRun) -> str:
    """Versions and hardware, on which the last bits depend."""
    chosen = {"engine": run.choices.get("engine"), "threads": run.choices.get("threads"), **run.versions}
    device = run.summary.get("device") or run.facts.get("device")
    words = [f"{name} {value}" for name, value in {"device": device, **chosen}.items() if value is not None]
    return f"Computed with {', '.join(words)}." if words else ""


def _table(table: Table | None, missing: str = "", title: str = "") -> str:
    """A table that scrolls horizontally on narrow screens; `missing` in place of None."""
    if table is None:
        return missing
    head = "".join(f"<th scope='col'>{escape(cell.replace(' %', PERCENT))}</th>" for cell in table.heading)
    body = "".join(
        f"<tr><th scope='row'>{escape(row[0])}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in table.rows
    )
    notes = "".join(f"<p class='note'>{escape(note)}</p>" for note in table.notes)
    return (
        f"{title}<div class='scroll' tabindex='0' role='region' aria-label='table'>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{notes}"
    )


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _json(value: Any) -> str:
    """JSON that is safe in a script element: no `<` can end it early."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (resources.files("fedlalr.report") / "assets" / name).read_text(encoding="utf-8")
