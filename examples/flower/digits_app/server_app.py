"""The server app, which runs beside the superlink."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from digits_app.task import algorithm, data, model, settings
from fedlalr.flower import FederatedStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run all rounds. `strategy.result` then has the records, the state and the trained model."""
    config = context.run_config
    strategy = FederatedStrategy(
        model(context),
        algorithm(context),
        settings(context),
        population=int(config["nodes"]),
        test=data(context),  # only its test set is used
        deadline=float(config["deadline"]),
        join_deadline=float(config["join-deadline"]),
    )
    strategy.start(grid)
