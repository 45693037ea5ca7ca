"""`fedlalr doctor`: check this machine for anything that would be slow or fail."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedlalr.cli.errors import FAILED
from fedlalr.cli.options import Json
from fedlalr.cli.progress import print_json, standard_output
from fedlalr.federation.doctor import GIB, Health, examine


def doctor(
    run_dir: Annotated[Path, typer.Option(help="Directory for runs.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Report versions, devices, threads, data sets and free disk space, and anything that would be slow or fail here.

    Does two tiny runs, and writes and removes one checkpoint. The exit code is 1 if a check fails.
    """
    health = examine(run_dir)
    if as_json:
        print_json(asdict(health))
    else:
        standard_output().print("\n".join(in_words(health)), highlight=False)
    if any(finding.grade == "fails" for finding in health.findings):
        raise typer.Exit(FAILED)


def in_words(health: Health) -> list[str]:
    versions = ", ".join(f"{name} {version or 'not installed'}" for name, version in health.versions.items())
    memory = f", {health.memory / GIB:.1f} GiB of memory free"
    load = f", load {health.load:.1f}" if health.load is not None else ""
    here = [f"{name} ({where})" for name, where in health.data.items() if where is not None]
    missing = [name for name, where in health.data.items() if where is None]
    disk = ", ".join(f"{free / GIB:.1f} GiB for {name}" for name, free in health.disk.items())
    checkpoint = (
        f"; a checkpoint of a million parameters takes {health.checkpoint_seconds * 1000:.0f} ms"
        if health.checkpoint_seconds is not None
        else ""
    )
    lines = [
        f"versions: {versions}",
        f"machine: {health.machine}, {health.cores} cores{load}{memory}",
        f"devices: {'; '.join(health.devices)}",
        f"threads: torch uses {health.threads}",
        f"data: {', '.join(here) or 'none'}; data folder {health.data_folder}",
        *([f"      not found, see `fedlalr data fetch`: {', '.join(missing)}"] if missing else []),
        f"disk: {disk}{checkpoint}",
    ]
    if not health.findings:
        return [*lines, "no problems found"]
    return lines + [f"{finding.grade}: {finding.what}; {finding.advice}" for finding in health.findings]
