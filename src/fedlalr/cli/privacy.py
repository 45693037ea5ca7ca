"""`fedlalr privacy`: the privacy that runs on the same clients have spent, each and all together."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fedlalr.cli.options import Json, Places
from fedlalr.cli.progress import print_json, standard_output, table
from fedlalr.config.errors import ConfigError, as_config_errors
from fedlalr.federation.privacy.accounting import Spent, composed_epsilon, solve_noise_multiplier
from fedlalr.federation.storage.journal import CHECKPOINTS
from fedlalr.report.runs import ReportedRun, find_runs, read_run


def privacy(
    places: Places,
    delta: Annotated[
        float | None, typer.Option(help="The δ at which ε is computed.", show_default="the smallest one of the runs")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the privacy that runs have spent, separately and together, as ε at a common δ.

    The privacy losses of runs on the same clients add up: give all of these runs, including tuning runs, which are in
    the directory of a comparison. A run without privacy is rejected, because there is no ε for what it reveals.

    [bold]Examples[/]

    fedlalr privacy runs/private

    fedlalr privacy runs/first runs/second --delta 1e-6
    """
    runs = [read_run(path) for path in find_runs(places, tuning=True)]
    deltas = [_stored(run)["privacy.delta"] for run in runs]
    if delta is None:
        delta = min((each for each in deltas if each is not None), default=None)
    if delta is None:
        raise ConfigError("the runs have no delta; choose one with --delta, such as 1e-5")
    with as_config_errors(ValueError, ImportError):
        spent = [_spent(run) for run in runs]
        each = [composed_epsilon([one], delta) for one in spent]
        together = composed_epsilon(spent, delta)
    rows = [(str(run.path), one, found) for run, one, found in zip(runs, spent, each, strict=True)]
    if as_json:
        plain = [{"run": name, **one._asdict(), "epsilon": found} for name, one, found in rows]
        print_json({"delta": delta, "epsilon": together, "runs": plain})
        return
    _show(rows, together, delta, same_clients=_same_clients(runs))


def _stored(run: ReportedRun) -> dict[str, Any]:
    """The settings of a run with privacy, from its checkpoint."""
    if not run.facts:
        raise ConfigError(f"{run.path} has no checkpoint that can be read, so its settings are not known")
    if run.facts.get("privacy") is None:
        raise ConfigError(
            f"{run.path} was trained without privacy, so there is no ε for its clients; give only runs with privacy=…"
        )
    return dict(run.facts)


def _spent(run: ReportedRun) -> Spent:
    """The rounds of a run, including one with a checkpoint whose record was not written."""
    stored = _stored(run)
    rate = stored["clients_per_round"] / stored["data.clients"]
    noise = stored["privacy.noise_multiplier"]
    if noise is None:
        noise = solve_noise_multiplier(stored["privacy.epsilon"], rate, stored["rounds"], stored["privacy.delta"])
    saved = [int(place.name.removeprefix("round-")) for place in (run.path / CHECKPOINTS).glob("round-*")]
    return Spent(noise, rate, max(len(run.records), *saved))


def _same_clients(runs: list[ReportedRun]) -> bool:
    """Whether all runs have the same data."""
    data = [{name: value for name, value in run.facts.items() if name.startswith("data.")} for run in runs]
    return all(each == data[0] for each in data)


def _show(rows: list[tuple[str, Spent, float]], together: float, delta: float, same_clients: bool) -> None:
    heading = ("run", "rounds", "rate", "noise multiplier", f"ε at δ = {delta:g}")
    cells = [
        (name, str(one.rounds), f"{one.rate:.4g}", f"{one.noise_multiplier:g}", f"{epsilon:.3f}")
        for name, one, epsilon in rows
    ]
    if len(rows) > 1:
        cells.append(("together", str(sum(one.rounds for _, one, _ in rows)), "", "", f"{together:.3f}"))
    console = standard_output()
    console.print(table(heading, cells))
    if not same_clients:
        console.print("The runs have different data: the last line holds for a client that is in all of them.")
