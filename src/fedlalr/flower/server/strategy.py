"""`FederatedStrategy`: any of the library's methods on Flower, from its slot table."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
from fedlalr.federation.metrics import Measures, check_measures
from fedlalr.federation.observers import Observer, RunInfo, show_round
from fedlalr.federation.record import Record
from fedlalr.federation.round import RoundFailed, ServerState
from fedlalr.federation.run import (
    Result,
    evaluate_state,
    initial_state,
    make_record,
    named_state,
    number_of_threads,
    trained_model,
)
from fedlalr.federation.storage.fingerprint import facts_of
from fedlalr.federation.storage.journal import Journal
from fedlalr.federation.trajectory import Trajectory
from fedlalr.federation.validation import check_cohort, check_observers, check_rounds, check_test
from fedlalr.flower.client_data import RemoteClients
from fedlalr.flower.server.accepted_rounds import Ledger
from fedlalr.flower.server.rounds import Rounds, check_no_probes
from fedlalr.flower.server.state import FederatedServer
from fedlalr.flower.settings import Settings
from fedlalr.flower.wire.arrays import LAYOUTS
from fedlalr.flower.wire.model_arrays import as_arrays, with_arrays

ENGINE = "flower"
"""What a run directory calls the engine of a run on Flower."""

log = logging.getLogger("flwr.fedlalr")


class FederatedStrategy(Strategy):
    """Runs a method on Flower's nodes as `fl.run` does in the simulator: the same cohorts, checks, reduction and files.

    model, algorithm: as in `fl.run`.
    settings: the options of `fl.run` by name. The client app needs the same.
    population: how many clients there are; their ids, from 0, are the nodes' `partition-id`.
    test: a test set (inputs, targets) on the server, or a population that has one; None: the clients' training loss.
    measures: as in `fl.run`, of that test set.
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
        measures: Measures | None = None,
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
        check_observers(observers)
        self.settings = Settings.of(settings)
        self.training = self.settings.training(model, algorithm, RemoteClients(population))
        self.rules = self.settings.rules(algorithm)
        self.cohort_size = check_cohort(self.settings.clients_per_round, population, self.settings.min_clients)
        self.model, self.observers = model, tuple(observers)
        self.test = test.test if isinstance(test, Population) else test
        self.transform = test.transform if isinstance(test, Population) else None
        if self.test is not None:
            check_test(self.test)
        check_measures(measures, self.test)
        self.measures = measures
        self.deadline, self.join_deadline, self.retries, self.poll = deadline, join_deadline, retries, poll
        self.layout, self.spool_dir = layout, spool_dir or self.settings.run_dir
        self.result: Result | None = None
        self._rounds = self._new_rounds(initial_state(self.training), secrets.token_hex(8), Ledger())

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
        rounds = self.settings.rounds if num_rounds is None else num_rounds
        check_count("rounds", rounds)
        self.deadline = timeout or self.deadline
        fresh = initial_state(self.training)
        if initial_arrays is not None:
            fresh = with_arrays(fresh, initial_arrays, self.training.layout)
        with Journal(
            self.settings.run_dir, resume=self.settings.resume, every=self.settings.checkpoint_every
        ) as journal:
            info = self._begin(journal, fresh, rounds)
            asked = range(info.first_round, rounds + 1)
            check_no_probes([one for one in self.observers if isinstance(one, Trajectory)], asked)
            self.summary()
            found = FlowerResult()
            with number_of_threads(journal.choices["threads"]):
                for observer in self.observers:
                    observer.on_start(info)
                check_no_probes(self.observers, asked)
                journal.start(self._server.state)
                self._evaluate_with(evaluate_fn, found)
                while self._server.state.round < rounds:
                    record = self._play(grid, train_config or ConfigRecord(), journal, rounds)
                    found.train_metrics_clientapp[record.round] = self._metrics(record)
                    self._evaluate_with(evaluate_fn, found)
                    model = partial(trained_model, self.model, self._server.state, self.training)
                    if show_round(self.observers, record, model):
                        break
        found.arrays = self._arrays()
        state = self._server.state
        trained = trained_model(self.model, state, self.training)
        self.result = Result(journal.records, named_state(state, self.training), trained, info)
        for observer in self.observers:
            observer.on_end(self.result)
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
        """Log what will run."""
        server, settings = self._server, self.settings
        begins = f"goes on after round {server.state.round}" if server.state.round else "begins"
        log.info(
            "%s: %d client%s, %d a round (at least %d), %d parameters; run %s %s; "
            "a round waits %g s for nodes and %g s for replies",
            type(self.training.algorithm).__name__,
            server.population,
            "" if server.population == 1 else "s",
            self.cohort_size,
            settings.min_clients,
            self.training.layout.size,
            server.run,
            begins,
            self.join_deadline,
            self.deadline,
        )

    def _begin(self, journal: Journal, fresh: ServerState, rounds: int) -> RunInfo:
        """Go on where the run directory is, or from the start."""
        settings, training = self.settings, self.training
        options = {
            "clients_per_round": self.cohort_size,
            "lr_decay": settings.lr_decay,
            "lr_decay_every": settings.lr_decay_every,
            "rules": self.rules,
        }
        facts = {} if settings.run_dir is None else facts_of(training, training.clients, self.test, options)
        state = journal.restore(fresh, facts, (), ENGINE)
        check_rounds(rounds, state.round)
        journal.choices = journal.choices or {
            "engine": ENGINE,
            "threads": torch.get_num_threads(),
            "run": self._server.run,
        }
        ledger = Ledger(journal.choices.get("accepted"))
        if state.round == 0:
            ledger.saved()
        self._rounds = self._new_rounds(state, journal.choices["run"], ledger)
        return RunInfo(
            algorithm=type(training.algorithm).__name__,
            engine=ENGINE,
            reason="the clients are Flower's nodes",
            device=str(training.device),
            rounds=rounds,
            first_round=state.round + 1,
            population=self._server.population,
            clients_per_round=self.cohort_size,
            parameters=training.layout.size,
        )

    def _play(self, grid: Grid, config: ConfigRecord, journal: Journal, rounds: int) -> Record:
        """One round to the end, tried again where that is allowed, and written down."""
        began, t = time.perf_counter(), self._server.state.round + 1
        for left in range(self.retries, -1, -1):
            try:
                messages = self._rounds.ask(grid, config)
                outcome = self._rounds.close(self._rounds.deliver(grid, messages))
                break
            except RoundFailed as failed:
                if left == 0:
                    raise
                log.warning("%s. Trying the round again, %d times at most", failed, left)
        evaluation = evaluate_state(outcome.state, self.training, self.test, self.transform, measures=self.measures)
        lr = self.settings.rate(self.training.algorithm, t)
        record = make_record(outcome, evaluation, lr, self.cohort_size, self.training, time.perf_counter() - began)
        ledger, last = self._server.ledger, t == rounds
        if self.training.algorithm.slots.kept:
            journal.choices["accepted"] = ledger.as_dict()
        record = journal.add(outcome.state, record, last=last)
        if journal.path is None or last or t % self.settings.checkpoint_every == 0:
            ledger.saved()
        _show(record, rounds)
        return record

    def _arrays(self) -> ArrayRecord:
        return as_arrays(self._server.state, self.training.layout)

    def _metrics(self, record: Record) -> MetricRecord:
        return MetricRecord(
            {"train_loss": record.train_loss, "clients": record.clients, "rejected": len(record.rejected)}
        )

    def _evaluate_with(
        self, function: Callable[[int, ArrayRecord], MetricRecord | None] | None, found: FlowerResult
    ) -> None:
        if function is not None:
            t = self._server.state.round
            metrics = function(t, self._arrays())
            if metrics is not None:
                found.evaluate_metrics_serverapp[t] = metrics

    def _new_rounds(self, state: ServerState, run: str, ledger: Ledger) -> Rounds:
        server = FederatedServer(
            self.training,
            self.settings,
            self.rules,
            self.cohort_size,
            state,
            run=run,
            ledger=ledger,
            layout=self.layout,
            spool_folder=self.spool_dir,
        )
        return Rounds(server, self.observers, deadline=self.deadline, join_deadline=self.join_deadline, poll=self.poll)

    @property
    def _server(self) -> FederatedServer:
        return self._rounds.server


def _show(record: Record, rounds: int) -> None:
    """Log a round."""
    t, accuracy = record.round, "" if record.accuracy is None else f"accuracy {record.accuracy:.1%}, "
    for client, reason in record.rejected:
        log.warning("round %d: the reply of client %d was refused: %s", t, client, reason)
    replies = "1 reply" if record.clients == 1 else f"{record.clients} replies"
    log.info(f"round {t}/{rounds}: {accuracy}loss {record.loss:.4f}, {replies}, {record.seconds:.1f} s")
