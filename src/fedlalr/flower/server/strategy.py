"""`FederatedStrategy`: any of the library's methods on Flower, from its slot table."""

from __future__ import annotations

import logging
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result as FlowerResult
from flwr.serverapp.strategy import Strategy
from torch import Tensor, nn

from fedlalr.algorithms.slots import Algorithm
from fedlalr.common.checks import check_choice, check_count, check_positive
from fedlalr.data.population import Population, Samples
from fedlalr.federation.metrics import Metrics
from fedlalr.federation.observers import Observer, RunInfo
from fedlalr.federation.record import Record
from fedlalr.federation.replies.screening import SEVERAL
from fedlalr.federation.result import Result
from fedlalr.federation.round import RoundFailed, RoundOutcome, ServerState
from fedlalr.federation.session import Problem, RepliesRejected, Session, initial_state, run_info
from fedlalr.federation.trajectory import Trajectory
from fedlalr.flower.client_data import RemoteClients
from fedlalr.flower.server.accepted_rounds import Ledger
from fedlalr.flower.server.cohort_secret import load_secret, new_secret, save_secret, seal
from fedlalr.flower.server.rounds import Rounds, check_no_probes
from fedlalr.flower.server.state import FederatedServer
from fedlalr.flower.settings import read_settings
from fedlalr.flower.wire.arrays import LAYOUTS
from fedlalr.flower.wire.model_arrays import as_arrays, with_arrays
from fedlalr.training.ranks import ALONE

ENGINE = "flower"
"""What a run directory calls the engine of a run on Flower."""

log = logging.getLogger("flwr.fedlalr")


class FederatedStrategy(Strategy):
    """Runs a method on Flower's nodes as `fl.run` does in the simulator: the same checks, reduction and files.

    Cohorts are drawn from a secret of the server's, not from the seed, which the nodes know.

    model, algorithm: as in `fl.run`.
    settings: the options of `fl.run` by name. The client app needs the same.
    population: how many clients there are; their ids, from 0, are the nodes' `partition-id`.
    test: a test set (inputs, targets) on the server, or a population that has one; None: the clients' training loss.
    metrics: as in `fl.run`, of that test set.
    deadline: seconds that a round waits for replies once its clients were asked.
    join_deadline: seconds that a round waits for nodes to connect. A client that did not come is not waited for again,
        but takes part as soon as its node is there.
    retries: how often a round with too few usable replies is played again before the run fails.
    layout: "records", one record a slot, or "packed", one record for all, which Flower's modifiers expect.
    poll: seconds between two looks for replies.
    spool_dir: where uploads wait until a round closes; the run directory, or the system's temporary folder.

    After `start`, `result` is what `fl.run` returns.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: Algorithm,
        settings: Mapping[str, Any] | None = None,
        *,
        population: int,
        test: tuple[Samples, Tensor] | Population | None = None,
        metrics: Metrics | None = None,
        observers: Sequence[Observer] = (),
        deadline: float = 3600.0,
        join_deadline: float = 600.0,
        retries: int = 0,
        layout: str = "records",
        poll: float = 1.0,
        spool_dir: str | Path | None = None,
    ) -> None:
        check_count("population", population)
        for name, value in (("deadline", deadline), ("join_deadline", join_deadline), ("poll", poll)):
            check_positive(name, value)
        check_choice("layout", layout, LAYOUTS)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ValueError(f"retries must be a whole number of at least 0, not {retries!r}")
        held_out = test.test if isinstance(test, Population) else test
        options = read_settings(settings, test=held_out, metrics=metrics, observers=observers)
        problem = Problem.of(model, RemoteClients(population), algorithm, options, remote=True)
        self.problem = replace(problem, transform=test.transform) if isinstance(test, Population) else problem
        self.deadline, self.join_deadline, self.retries, self.poll = deadline, join_deadline, retries, poll
        self.layout, self.spool_dir = layout, spool_dir or options.run_dir
        self.result: Result | None = None
        self._rounds = self._new_rounds(initial_state(problem.training), secrets.token_hex(8), new_secret(), Ledger())

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> FlowerResult:
        """Run all rounds, from the start or from the last checkpoint.

        initial_arrays: parameters and buffers to begin with instead of the model's own.
        num_rounds, timeout: instead of the settings' `rounds` and of `deadline`.
        train_config: further entries of the record that the clients get, for modifiers of the client app.
        evaluate_fn: called with the round and the model's arrays before the first round and after every round.
        """
        if evaluate_config is not None:
            raise ValueError("there is no evaluation on the nodes, so leave evaluate_config out")
        if num_rounds is not None:
            check_count("rounds", num_rounds)
            self.problem = replace(self.problem, options=replace(self.problem.options, rounds=num_rounds))
        self.deadline = timeout or self.deadline
        fresh = initial_state(self.problem.training)
        if initial_arrays is not None:
            fresh = with_arrays(fresh, initial_arrays, self.problem.training.layout)
        found = FlowerResult()
        transport = NodesTransport(self, grid, train_config or ConfigRecord())
        with warnings.catch_warnings(), Session(self.problem, transport, fresh) as session:
            warnings.simplefilter("ignore", RepliesRejected)  # the log has them
            check_no_probes(session.observers, transport.asked)
            self._evaluate_with(evaluate_fn, found)
            for record in session.rounds():
                log_round(record, self.problem.options.rounds)
                found.train_metrics_clientapp[record.round] = _metrics(record)
                self._evaluate_with(evaluate_fn, found)
        found.arrays = self._arrays()
        self.result = session.result()
        return found

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort, wait for its nodes, and make the message for each."""
        return self._rounds.ask(grid, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the replies in one by one, close the round, and move the server's state on; or raise `RoundFailed`."""
        outcome = self._rounds.close(replies)
        return self._arrays(), MetricRecord({"train_loss": outcome.train_loss, "clients": outcome.accepted})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nothing: the model is evaluated on the server."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing: the model is evaluated on the server."""
        return None

    def summary(self) -> None:
        """Log what is about to run."""
        server, problem = self.server, self.problem
        begins = f"resumes after round {server.state.round}" if server.state.round else "starts"
        log.info(
            "%s: %d client%s, %d a round (at least %d), %d parameters; run %s %s; "
            "a round waits %g s for nodes and %g s for replies",
            type(problem.training.algorithm).__name__,
            server.population,
            "" if server.population == 1 else "s",
            problem.cohort_size,
            problem.options.min_clients,
            problem.training.layout.size,
            server.run,
            begins,
            self.join_deadline,
            self.deadline,
        )

    def _arrays(self) -> ArrayRecord:
        return as_arrays(self.server.state, self.problem.training.layout)

    def _evaluate_with(
        self, function: Callable[[int, ArrayRecord], MetricRecord | None] | None, found: FlowerResult
    ) -> None:
        if function is not None:
            t = self.server.state.round
            metrics = function(t, self._arrays())
            if metrics is not None:
                found.evaluate_metrics_serverapp[t] = metrics

    def _new_rounds(self, state: ServerState, run: str, secret: bytes, ledger: Ledger) -> Rounds:
        server = FederatedServer(
            self.problem,
            state,
            run=run,
            secret=secret,
            ledger=ledger,
            layout=self.layout,
            spool_folder=self.spool_dir,
        )
        observers = self.problem.options.observers
        return Rounds(server, observers, deadline=self.deadline, join_deadline=self.join_deadline, poll=self.poll)

    @property
    def server(self) -> FederatedServer:
        """The server's half of the run."""
        return self._rounds.server


class NodesTransport:
    """The transport of a session on Flower: its nodes train, over a grid."""

    ranks, kept, engine = ALONE, (), ENGINE  # what clients keep is on their nodes

    def __init__(self, strategy: FederatedStrategy, grid: Grid, config: ConfigRecord) -> None:
        self.strategy, self.grid, self.config = strategy, grid, config
        self.asked = range(0)
        """The rounds left to run."""

    def start(self, state: ServerState, choices: dict[str, Any]) -> RunInfo:
        """Take up the run's name, its secret and what was accepted, or note the new run's."""
        strategy, problem = self.strategy, self.strategy.problem
        self.asked = range(state.round + 1, problem.options.rounds + 1)
        check_no_probes([one for one in problem.options.observers if isinstance(one, Trajectory)], self.asked)
        secret = self._secret(choices)
        ledger = Ledger(choices.get("accepted"))
        if state.round == 0:
            ledger.saved()
        strategy._rounds = strategy._new_rounds(state, choices["run"], secret, ledger)
        strategy.summary()
        return run_info(problem, state, ENGINE, "the clients are Flower's nodes")

    def run_round(self, state: ServerState, lr: float) -> RoundOutcome:
        """Ask the cohort's nodes and close the round, tried again where that is allowed."""
        rounds = self.strategy._rounds
        for left in range(self.strategy.retries, -1, -1):
            try:
                messages = rounds.ask(self.grid, self.config)
                return rounds.close(rounds.deliver(self.grid, messages))
            except RoundFailed as failed:
                if left == 0:
                    raise
                log.warning("%s. Trying the round again, %d times at most", failed, left)
        raise AssertionError("the last try returns or raises")

    def recorded(self, choices: dict[str, Any]) -> None:
        """Note whose kept state counts."""
        if self.strategy.problem.training.algorithm.slots.kept:
            choices["accepted"] = self.strategy.server.ledger.as_dict()

    def saved(self) -> None:
        """Nodes may drop what no checkpoint refers to any more."""
        self.strategy.server.ledger.saved()

    def close(self) -> None:
        """Nothing to do: the nodes are Flower's."""

    def _secret(self, choices: dict[str, Any]) -> bytes:
        """The secret of the run, which is kept apart from its checkpoints."""
        folder = self.strategy.problem.options.run_dir
        if choices and folder is not None:
            return load_secret(Path(folder), choices.get("cohort_secret_sha256"))
        secret = self.strategy.server.secret
        if folder is not None:
            save_secret(Path(folder), secret)
        choices |= {
            "engine": ENGINE,
            "threads": torch.get_num_threads(),
            "run": self.strategy.server.run,
            "cohort_secret_sha256": seal(secret),
        }
        return secret


def log_round(record: Record, rounds: int) -> None:
    """One line a round, and one for every rejected reply."""
    t, accuracy = record.round, "" if record.accuracy is None else f"accuracy {record.accuracy:.1%}, "
    for client, reason in record.rejected:
        log.warning("round %d: the reply of client %d was rejected: %s", t, client, reason)
    for client in record.repeatedly:
        log.warning("client %d has been rejected in each of its last %d rounds or more", client, SEVERAL)
    replies = "1 reply" if record.clients == 1 else f"{record.clients} replies"
    log.info(f"round {t}/{rounds}: {accuracy}loss {record.loss:.4f}, {replies}, {record.seconds:.1f} s")


def _metrics(record: Record) -> MetricRecord:
    return MetricRecord({"train_loss": record.train_loss, "clients": record.clients, "rejected": len(record.rejected)})
