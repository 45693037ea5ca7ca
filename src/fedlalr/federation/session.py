"""A run from its checks to its result, whatever carries the broadcast to the clients and their replies back.

with Session(problem, transport) as session:
    for record in session.rounds():
        ...
result = session.result()
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from fedlalr.algorithms.slots import Slots
from fedlalr.data.test_set import is_one_tensor
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.evaluation import Evaluation, Score, distributions, evaluate, not_finite
from fedlalr.federation.observers import Observer, RunInfo, stopped_by
from fedlalr.federation.options import Options
from fedlalr.federation.problem import Problem
from fedlalr.federation.record import Record, held_out_loss
from fedlalr.federation.replies.screening import SEVERAL, Streaks
from fedlalr.federation.result import Result, named_state, personal_states, trained_model
from fedlalr.federation.round import RoundOutcome, ServerState
from fedlalr.federation.storage.fingerprint import plain
from fedlalr.federation.storage.journal import Journal
from fedlalr.federation.stragglers import remedy
from fedlalr.federation.validation import check_slots
from fedlalr.training import Training
from fedlalr.training.memory import check_kept
from fedlalr.training.options import options_in
from fedlalr.training.personal import shared_buffers
from fedlalr.training.ranks import Ranks
from fedlalr.training.torch_state import get_buffers, module_randomness, number_of_threads, set_buffers, undisturbed


class RepliesRejected(UserWarning):
    """A client's reply was rejected; the run continues without it."""


class Transport(Protocol):
    """Carries a round to the clients and back: an engine in the simulator, nodes on Flower."""

    ranks: Ranks
    holds_kept: bool
    """Whether this process holds what clients keep, so that its checkpoints contain it."""
    engine: str
    """The requested engine, which a resumed run must agree with."""

    def start(self, state: ServerState, choices: dict[str, Any]) -> RunInfo:
        """Prepare the first round. `choices` are those a resumed run was started with; a new run fills them in."""

    def run_round(self, state: ServerState, lr: float) -> RoundOutcome:
        """Sample a cohort, train it, reduce its replies. `RoundFailed` leaves the state as it was."""

    def evaluate_clients(self, state: ServerState) -> Mapping[int, Score]:
        """Evaluate every client that can be reached on its own samples; none if clients have no test samples."""

    def recorded(self, choices: dict[str, Any]) -> None:
        """Before a round is written: record in `choices` what a resumed run needs to know."""

    def saved(self) -> None:
        """After a checkpoint of the last round."""

    def close(self) -> None:
        """Release processes and memory."""


class Session:
    """Owns the state, the files and the records of a run."""

    def __init__(
        self,
        problem: Problem,
        transport: Transport,
        fresh: ServerState | None = None,
        watching: Sequence[Observer] = (),
    ) -> None:
        self.problem, self.training, self.options = problem, problem.training, problem.options
        self.transport = transport
        first = transport.ranks.is_first  # only the first rank reads and writes files and shows progress
        self.observers = (*self.options.observers, *watching) if first else ()
        self.journal = Journal(
            self.options.run_dir if first else None,
            resume=self.options.resume and first,
            every=self.options.checkpoint_every,
        )
        self._fresh = fresh
        self._streaks, self._named, self._searched = Streaks(), set[int](), set[str]()
        self._warned = self.options.debug or not first  # warn once; the debugger says more

    def __enter__(self) -> Session:
        """Open the files, restore or initialise the state, start the transport."""
        training, journal, ranks = self.training, self.journal, self.transport.ranks
        with ExitStack() as stack:
            stack.enter_context(undisturbed(training.device))
            stack.enter_context(ranks.watched())
            facts = self.problem.facts() if journal.path is not None else {}
            stack.enter_context(journal)
            ranks.prepare(training.model, self._shared())
            fresh = self._fresh or initial_state(training)
            kept = self.problem.first_kept(fresh) if self.transport.holds_kept else Slots()
            check_kept(kept, self.problem.most_kept, training.device)
            found = journal.restore(fresh, facts, kept, self.transport.engine)
            self.state = ranks.first(found)
            if (wanted := self.options.rounds) < (done := self.state.round):
                raise ValueError(f"rounds is {wanted}, but {done} rounds of the run are done; use at least {done}")
            stack.enter_context(closing(self.transport))
            started = self.transport.start(self.state, journal.choices)
            self.info = replace(started, history=tuple(journal.records))
            stack.enter_context(number_of_threads(journal.choices["threads"]))
            self._stopped = ranks.first(stopped_by(self.observers, lambda each: each.on_start(self.info)))
            journal.start(self.state)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def rounds(self) -> Iterator[Record]:
        """Run the remaining rounds, one at a time, until the last one or until an observer raises `Stop`."""
        while self.state.round < self.options.rounds and not self._stopped:
            record = self._round()
            self._stopped = self.transport.ranks.first(stopped_by(self.observers, partial(self._show, record)))
            if record.rejected and not self._warned:
                warnings.warn(_rejection(record), RepliesRejected, stacklevel=3)
                self._warned = True
            for client in set(record.repeatedly) - self._named if self.transport.ranks.is_first else ():
                warnings.warn(_shut_out(record, client), RepliesRejected, stacklevel=3)
                self._named.add(client)
            for problem in self._unusable(record) if self.transport.ranks.is_first else ():
                warnings.warn(problem, stacklevel=3)
            yield record

    def _unusable(self, record: Record) -> Iterator[str]:
        """Samples that make the loss of an evaluation NaN or infinite; they are searched for once."""
        evaluated = (
            (self.problem.test, record.loss, "the test set"),
            (self.problem.client_tests, held_out_loss(record), "the held-out data of client {}"),
        )
        for tests, loss, owner in evaluated:
            if tests is None or loss is None or math.isfinite(loss) or owner in self._searched:
                continue
            self._searched.add(owner)
            if (found := not_finite(tests, owner)) is not None:
                yield (
                    f"{found}, so the loss on it is {loss:g}; remove such samples, or fill in numbers, for example "
                    f"with torch.nan_to_num"
                )

    def _show(self, record: Record, observer: Observer) -> None:
        observer.on_model(record.round, partial(trained_model, self.problem.model, self.state, self.training))
        observer.on_round(record)

    def result(self) -> Result:
        """The result of the run, once its files are closed."""
        with undisturbed(self.training.device):
            result = Result(
                self.journal.records,
                named_state(self.state, self.training),
                trained_model(self.problem.model, self.state, self.training),
                self.info,
                personal_states(self.state, self.training, here=self.transport.holds_kept),
            )
        for observer in self.observers:
            observer.on_end(result)
        return result

    def _round(self) -> Record:
        """Train, check, reduce, update, evaluate, record, checkpoint."""
        began, t = time.perf_counter(), self.state.round + 1
        lr = self.problem.rate(t)
        outcome = self.transport.run_round(self.state, lr)
        self.state = outcome.state
        self.transport.recorded(self.journal.choices)
        last = t == self.options.rounds
        record = self._record(outcome, lr, began, due=last or t % self.options.evaluate_every == 0)
        for observer in self.observers if outcome.traces else ():
            observer.on_traces(t, lr, outcome.traces)  # first: a round that is saved is not run again
        record = self.journal.add(self.state, record, last=last)
        if self.journal.saves(t, last):
            self.transport.saved()
        return record

    def _record(self, outcome: RoundOutcome, lr: float, began: float, *, due: bool) -> Record:
        """Evaluate the new model, and every client's if it is due; the record of the round.

        Bytes include everything that is sent: the table's slots as they are encoded, the module's buffers and, if
        statistics are recalibrated or clients evaluated, the new x and the buffers once more.
        """
        state, training, evaluating = outcome.state, self.training, time.perf_counter()
        evaluation = self._evaluate()
        scores = self.transport.evaluate_clients(state) if due else {}
        outcome.timing["evaluate"] = time.perf_counter() - evaluating
        channel = Channel.of(self.problem.rules.compression, training, state.round)
        vector = training.division.shared.size * state.slots.x.element_size()
        buffers = sum(buffer.nbytes for buffer in shared_buffers(training, state.buffers).values())
        again = outcome.measured + len(scores)
        over = distributions(scores)
        return Record(
            round=state.round,
            loss=evaluation.loss if evaluation else outcome.train_loss,
            accuracy=evaluation.accuracy if evaluation else over["accuracy"].mean if "accuracy" in over else None,
            train_loss=outcome.train_loss,
            lr=lr,
            seconds=time.perf_counter() - began,
            bytes_up=outcome.replied * channel.bytes_up + (outcome.replied + outcome.measured) * buffers,
            bytes_down=len(outcome.cohort) * (channel.bytes_down + buffers) + again * (vector + buffers),
            clients=outcome.accepted,
            epsilon=outcome.epsilon,
            rejected=outcome.rejected,
            clipped=outcome.clipped,
            repeatedly=self._streaks.update(outcome.cohort, outcome.rejected),
            timing=outcome.timing,
            metrics=evaluation.metrics if evaluation else {},
            per_client=over,
            virtual_seconds=outcome.virtual_seconds,
            staleness=outcome.staleness,
        )

    def _evaluate(self) -> Evaluation | None:
        """Evaluate the server's model on the test set, if there is one."""
        training = self.training
        if self.problem.test is None:
            return None
        training.layout.load(training.model, self.state.slots.x)
        set_buffers(training.model, self.state.buffers)
        with module_randomness(training, self.state.round):  # some modules draw random numbers in eval mode too
            return evaluate(
                training.model,
                self.problem.test,
                training.loss,
                transform=self.problem.transform,
                batch_size=None if is_one_tensor(self.problem.test) else training.batch_size,
                compute=training.compute,
                ranks=self.transport.ranks,
                metrics=self.options.metrics,
            )

    def _shared(self) -> dict[str, object]:
        """What must be the same on all ranks."""
        options = {each.name: plain(getattr(self.options, each.name)) for each in options_in(Options, "server")}
        rounds, seed = self.options.rounds, self.options.seed
        return {"algorithm": repr(self.training.algorithm), "rounds": rounds, "seed": seed, "options": options}


def initial_state(training: Training) -> ServerState:
    """The server before the first round."""
    parameters = training.layout.flatten(dict(training.model.named_parameters()))
    slots = training.algorithm.init(parameters)
    check_slots(training.algorithm, slots, parameters)
    return ServerState(round=0, slots=slots, buffers=get_buffers(training.model))


def run_info(problem: Problem, state: ServerState, engine: str, reason: str) -> RunInfo:
    """What is known when a run starts."""
    training = problem.training
    return RunInfo(
        algorithm=type(training.algorithm).__name__,
        engine=engine,
        reason=reason,
        device=str(training.device),
        rounds=problem.options.rounds,
        first_round=state.round + 1,
        population=len(training.clients),
        clients_per_round=problem.cohort_size,
        parameters=training.layout.size,
        accuracy_every=problem.accuracy_every,
    )


def _rejection(record: Record) -> str:
    client, reason = record.rejected[0]
    others = f", and {len(record.rejected) - 1} more" if len(record.rejected) > 1 else ""
    return (
        f"round {record.round} rejected the reply of client {client} ({reason}){others}; "
        f"result.history[{record.round - 1}].rejected lists all rejected replies of that round"
    )


def _shut_out(record: Record, client: int) -> str:
    reason = dict(record.rejected)[client]
    return (
        f"client {client} has been rejected in each of its last {SEVERAL} rounds ({reason}), so the model does not "
        f"learn from its data; {remedy(reason, 'debug=True')}"
    )
