"""`FederatedStrategy`: any method of the library on Flower, driven by its slot table."""

from __future__ import annotations

import logging
import math
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
from fedlalr.common.checks import check_choice, whole_number
from fedlalr.common.option_types import Count, Positive, check_type
from fedlalr.data.population import Population, Samples
from fedlalr.federation.combinations import PACKED, SCORES
from fedlalr.federation.evaluation import Metrics, Score
from fedlalr.federation.observers import Observer, RunInfo
from fedlalr.federation.problem import Problem
from fedlalr.federation.record import Record, spent
from fedlalr.federation.replies.screening import SEVERAL
from fedlalr.federation.result import Result
from fedlalr.federation.round import RoundFailed, RoundOutcome, ServerState
from fedlalr.federation.session import RepliesRejected, Session, initial_state, run_info
from fedlalr.federation.trajectory import Trajectory
from fedlalr.flower.client_data import RemoteClients
from fedlalr.flower.server.buffered import BufferedRounds
from fedlalr.flower.server.cohort_secret import load_secret, new_secret, save_secret, seal
from fedlalr.flower.server.rounds import Rounds, check_no_probes
from fedlalr.flower.server.state import AcceptedRounds, FederatedServer
from fedlalr.flower.settings import read_settings
from fedlalr.flower.wire.arrays import LAYOUTS
from fedlalr.flower.wire.records import as_arrays, with_arrays
from fedlalr.training.ranks import ALONE

ENGINE = "flower"
"""The name of the engine in run directories of runs on Flower."""

log = logging.getLogger("flwr.fedlalr")


class FederatedStrategy(Strategy):
    """Runs a method on Flower's nodes like `fl.run` in the simulator: the same checks, reductions and files.

    Cohorts are sampled from a secret of the server, not from the seed, which the nodes know.

    model, algorithm: as in `fl.run`.
    settings: the options of `fl.run` by name. The client app needs the same.
    population: number of clients; their ids, from 0, are the nodes' `partition-id`.
    test: a test set on the server, as in `fl.run`, or a population that has one; None: report the clients' training
        loss.
    metrics: as in `fl.run`, computed on that test set.
    client_tests: let the nodes evaluate the model on test samples of their own (`test` of the client app); with
        `holdout` in the settings they do so on the samples they hold out.
    deadline: maximum seconds that a round waits for replies after sending its messages.
    join_deadline: maximum seconds that a round waits for nodes to connect. A client that did not connect is not waited
        for again, but takes part as soon as its node connects.
    retries: how often a round with too few usable replies is repeated before the run fails.
    layout: "records", one record per slot, or "packed", one record for all slots, as Flower's mods expect.
    poll: seconds between polls for replies.
    spool_dir: folder for uploads until their round closes; default: the run directory, or the system's temporary
        folder.

    After `start`, `result` is the result that `fl.run` would return.
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
        client_tests: bool = False,
        observers: Sequence[Observer] = (),
        deadline: float = 3600.0,
        join_deadline: float = 600.0,
        retries: int = 0,
        layout: str = "records",
        poll: float = 1.0,
        spool_dir: str | Path | None = None,
    ) -> None:
        check_type("population", population, Count)
        for name, value in (("deadline", deadline), ("join_deadline", join_deadline), ("poll", poll)):
            check_type(name, value, Positive)
        check_choice("layout", layout, LAYOUTS)
        whole_number("retries", retries, least=0)
        given, theirs = (None, test.test) if isinstance(test, Population) else (test, None)
        more = {feature for feature, chosen in ((PACKED, layout == "packed"), (SCORES, client_tests)) if chosen}
        options = read_settings(settings, more, test=given, metrics=metrics, observers=observers)
        problem = Problem.of(model, RemoteClients(population, theirs), algorithm, options, remote=True)
        self.problem = replace(problem, transform=test.transform) if isinstance(test, Population) else problem
        self.deadline, self.join_deadline, self.retries, self.poll = deadline, join_deadline, retries, poll
        self.layout, self.spool_dir = layout, spool_dir or options.run_dir
        self.evaluates_clients = client_tests or options.holdout is not None
        self.result: Result | None = None
        self._rounds = self._new_rounds(
            initial_state(problem.training), secrets.token_hex(8), new_secret(), AcceptedRounds()
        )

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

        initial_arrays: initial parameters and buffers instead of the model's.
        num_rounds, timeout: override `rounds` of the settings, and `deadline`.
        train_config: further entries of the clients' configuration record, for mods of the client app.
        evaluate_fn: called with the round and the model's arrays, before the first round and after every round.
        """
        if evaluate_config is not None:
            raise ValueError("evaluate_config must be None: nodes evaluate according to holdout and evaluate_every")
        if num_rounds is not None:
            check_type("rounds", num_rounds, Count)
            if self.problem.rules.mechanism is not None:
                self.problem.rules.mechanism.check_rounds(num_rounds)
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
        """Sample the cohort, wait for its nodes, and create a message for each."""
        return self._rounds.ask(grid, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Process the replies one by one, close the round, and update the server's state; or raise `RoundFailed`."""
        outcome = self._rounds.close(replies)
        return self._arrays(), MetricRecord(_known(outcome.train_loss, outcome.epsilon) | {"clients": outcome.accepted})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Unused: `start` evaluates, on the server and on the nodes."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Unused: `start` evaluates, on the server and on the nodes."""
        return None

    def summary(self) -> None:
        """Log a description of the run."""
        server, problem = self.server, self.problem
        begins = f"resumes after round {server.state.round}" if server.state.round else "starts"
        clients = "1 client" if server.population == 1 else f"{server.population} clients"
        log.info(
            f"{type(problem.training.algorithm).__name__}: {clients}, {problem.cohort_size} per round (at least "
            f"{problem.options.min_clients}), {problem.training.layout.size} parameters; run {server.run} {begins}; "
            f"deadlines: {self.join_deadline:g} s for nodes, {self.deadline:g} s for replies"
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

    def _new_rounds(self, state: ServerState, run: str, secret: bytes, accepted_rounds: AcceptedRounds) -> Rounds:
        server = FederatedServer(
            self.problem,
            state,
            run=run,
            secret=secret,
            accepted_rounds=accepted_rounds,
            layout=self.layout,
            spool_folder=self.spool_dir,
        )
        kind = Rounds if self.problem.options.asynchronous is None else BufferedRounds
        return kind(server, deadline=self.deadline, join_deadline=self.join_deadline, poll=self.poll)

    @property
    def server(self) -> FederatedServer:
        """The server's state of the run."""
        return self._rounds.server


class NodesTransport:
    """The transport of a session on Flower: its nodes train, reached over a grid."""

    ranks, holds_kept, engine = ALONE, False, ENGINE  # the clients' state is on their nodes

    def __init__(self, strategy: FederatedStrategy, grid: Grid, config: ConfigRecord) -> None:
        self.strategy, self.grid, self.config = strategy, grid, config
        self.asked = range(0)
        """The remaining rounds."""

    def start(self, state: ServerState, choices: dict[str, Any]) -> RunInfo:
        """Restore the run's name, secret and accepted rounds, or record those of a new run."""
        strategy, problem = self.strategy, self.strategy.problem
        self.asked = range(state.round + 1, problem.options.rounds + 1)
        check_no_probes([one for one in problem.options.observers if isinstance(one, Trajectory)], self.asked)
        secret = self._secret(choices)
        accepted_rounds = AcceptedRounds(choices.get("accepted"))
        if state.round == 0:
            accepted_rounds.saved()
        strategy._rounds = strategy._new_rounds(state, choices["run"], secret, accepted_rounds)
        strategy.summary()
        return run_info(problem, state, ENGINE, "the clients are Flower's nodes")

    def run_round(self, state: ServerState, lr: float) -> RoundOutcome:
        """Message the cohort's nodes and close the round; repeat it up to `retries` times."""
        rounds = self.strategy._rounds
        if isinstance(rounds, BufferedRounds):
            return rounds.update(self.grid, self.config)
        left = self.strategy.retries
        while True:
            try:
                messages = rounds.ask(self.grid, self.config)
                return rounds.close(rounds.deliver(self.grid, messages))
            except RoundFailed as failed:
                if left == 0:
                    raise
                log.warning("%s. Repeating the round; %d retries left", failed, left)
                left -= 1

    def evaluate_clients(self, state: ServerState) -> dict[int, Score]:
        """Let the nodes evaluate, if they have test samples."""
        return self.strategy._rounds.evaluate(self.grid, self.config) if self.strategy.evaluates_clients else {}

    def recorded(self, choices: dict[str, Any]) -> None:
        """Record which kept states are valid."""
        if self.strategy.problem.clients_keep:
            choices["accepted"] = self.strategy.server.accepted_rounds.as_dict()

    def saved(self) -> None:
        """Let nodes remove states that no checkpoint refers to any more."""
        self.strategy.server.accepted_rounds.saved()

    def close(self) -> None:
        """Nothing to do: Flower manages the nodes."""

    def _secret(self, choices: dict[str, Any]) -> bytes:
        """The secret of the run, stored separately from its checkpoints."""
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
    """Log one line per round, and one per rejected reply."""
    t, accuracy = record.round, "" if record.accuracy is None else f"accuracy {record.accuracy:.1%}, "
    for client, reason in record.rejected:
        log.warning("round %d: the reply of client %d was rejected: %s", t, client, reason)
    for client in record.repeatedly:
        log.warning("client %d has been rejected in each of its last %d rounds or more", client, SEVERAL)
    replies = "1 reply" if record.clients == 1 else f"{record.clients} replies"
    loss = "" if math.isnan(record.loss) else f"loss {record.loss:.4f}, "
    log.info(f"round {t}/{rounds}: {accuracy}{loss}{spent(record)}{replies}, {record.seconds:.1f} s")


def _metrics(record: Record) -> MetricRecord:
    known = _known(record.train_loss, record.epsilon)
    return MetricRecord(known | {"clients": record.clients, "rejected": len(record.rejected)})


def _known(train_loss: float, epsilon: float | None) -> dict[str, Any]:
    """The numbers that a round has: private nodes send no loss, and others have no ε."""
    known: dict[str, Any] = {} if math.isnan(train_loss) else {"train_loss": train_loss}
    return known | ({} if epsilon is None else {"epsilon": epsilon})
