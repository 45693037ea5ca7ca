"""`fedlalr flower local`: run a configuration with real Flower processes on this machine, and follow its records."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

from fedlalr.config import Config, RunDirectory
from fedlalr.federation import Record
from fedlalr.flower.export import check_settings, export
from fedlalr.flower.local.launch import FederationError, LocalFederation


def demonstrate(
    config: Config,
    run_dir: Path | None,
    *,
    secure: bool,
    patience: float,
    on_stage: Callable[[str], None],
    on_record: Callable[[Record], None],
) -> list[Record]:
    """Start a superlink, supernodes and the run; returns the records of its rounds. Leaves only the run directory.

    `patience` is the most seconds without a finished round. `on_stage` is called with the name of each part before it
    starts, `on_record` after every round. No process and no temporary file is left, even after an exception or Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="fedlalr-flower-") as name:
        folder = Path(name)
        results = (run_dir or folder / "run").resolve()
        app = export(config, folder / "app")
        nodes = check_settings(config)
        with LocalFederation(folder / "federation", secure=secure) as federation:
            on_stage("the superlink")
            federation.start_superlink()
            for node in range(nodes):
                on_stage(f"supernode {node + 1} of {nodes}")
                keys = federation.register(node) if secure else None
                federation.start_node(node, {"partition-id": node, "state-dir": str(folder / "kept")}, keys=keys)
            on_stage("the run")
            waits = {"deadline": patience, "join-deadline": patience}
            federation.submit(app, {"run-dir": str(results), **waits})
            watched = _Watched(RunDirectory(results), on_record)
            federation.wait_for("run", patience, progress=watched.look)
            watched.look()
            if not federation.completed() or len(watched.records) < config.rounds:
                raise FederationError(f"the run failed: {reason(federation.tail('run'))}")
            return watched.records


def reason(log: str) -> str:
    """Why a run failed: the library's last error message in the log, or else the whole log.

    >>> reason("Traceback\\n  File …\\nfedlalr.federation.round.RoundFailed: round 2: no replies\\nExit Code: 201")
    'round 2: no replies'
    """
    messages = re.findall(r"^fedlalr\.[\w.]+: (.*)$", log, flags=re.M)
    return str(messages[-1]) if messages else f"its log ends with\n{log}"


class _Watched:
    """The records of a run in another process; for a resumed run, `on_record` is called only for new rounds."""

    def __init__(self, directory: RunDirectory, on_record: Callable[[Record], None]) -> None:
        self.directory, self.on_record = directory, on_record
        self.records = directory.records()

    def look(self) -> int:
        """Read new records; returns the total number."""
        for record in self.directory.records()[len(self.records) :]:
            self.records.append(record)
            self.on_record(record)
        return len(self.records)
