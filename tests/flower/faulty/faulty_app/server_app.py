"""The server of the misbehaving app."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from faulty_app import task
from fedlalr.flower import FederatedStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds."""
    config = context.run_config
    files = {"run_dir": str(config["run-dir"]), "resume": True}
    FederatedStrategy(
        task.model(int(config["hidden"])),
        task.algorithm(config),
        task.settings(config) | files,
        population=task.CLIENTS,
        deadline=float(config["deadline"]),
        join_deadline=float(config["join-deadline"]),
        layout=str(config["layout"]),
        poll=0.5,
    ).start(grid)
