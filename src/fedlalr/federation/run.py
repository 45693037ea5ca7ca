"""`fl.run`: federated training of a module from start to end."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from fedlalr.algorithms.slots import Algorithm
from fedlalr.data.population import Clients, Population, Samples, as_clients
from fedlalr.data.transforms import Transform
from fedlalr.federation.debug import Debugger
from fedlalr.federation.evaluation import Evaluation, evaluate
from fedlalr.federation.metrics import Measures, check_measures
from fedlalr.federation.observers import Observer, RunInfo, show_round
from fedlalr.federation.options import Options
from fedlalr.federation.record import Record
from fedlalr.federation.replies.reductions import SlotReduction
from fedlalr.federation.replies.screening import MAX_NORM_RATIO
from fedlalr.federation.round import RoundOutcome, ServerState, module_randomness, play_round
from fedlalr.federation.sampling import sample
from fedlalr.federation.storage.fingerprint import facts_of
from fedlalr.federation.storage.journal import Journal
from fedlalr.federation.validation import (
    check_cohort,
    check_observers,
    check_problem,
    check_rounds,
    check_slots,
)
from fedlalr.training import Epochs, Interval, Training, create_engine
from fedlalr.training.copying import copied
from fedlalr.training.engines.distributed import join_ranks
from fedlalr.training.engines.reference import get_buffers, set_buffers
from fedlalr.training.interfaces import Engine, Loss, Probe
from fedlalr.training.local_step import starting_slots
from fedlalr.training.memory import forked_generators
from fedlalr.training.ranks import ALONE, Ranks
from fedlalr.training.torch_state import undisturbed

State = dict[str, dict[str, Tensor]]


class RepliesRefused(UserWarning):
    """A client's reply was left out; the run goes on without it."""


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gives back. It is equal to itself alone, as modules and tensors are."""

    metrics: list[Record]
    """One record a round."""
    state: State
    """The server's slots by name, each a dict from parameter name to tensor."""
    model: nn.Module
    """The trained module, a copy of the one passed in."""
    info: RunInfo

    @property
    def bytes_up(self) -> int:
        """Slots sent by the clients over the whole run."""
        return sum(record.bytes_up for record in self.metrics)

    @property
    def bytes_down(self) -> int:
        """Slots sent by the server over the whole run."""
        return sum(record.bytes_down for record in self.metrics)

    def __repr__(self) -> str:
        """One line for a notebook, where every number of the state would be thousands."""
        if not self.metrics:
            return f"Result({self.info.algorithm}, no rounds)"
        last = self.metrics[-1]
        accuracy = "" if last.accuracy is None else f"accuracy {last.accuracy:.1%}, "
        measures = "".join(f"{name} {value:.4g}, " for name, value in last.measures.items())
        return (
            f"Result({self.info.algorithm}, {last.round} {'round' if last.round == 1 else 'rounds'}: "
            f"{accuracy}loss {last.loss:.4g}, {measures}"
            f"{self.bytes_up / 1e6:.3g} MB up, {self.bytes_down / 1e6:.3g} MB down)"
        )


def run(
    model: nn.Module,
    clients: Clients | Sequence[object],
    algorithm: Algorithm,
    *,
    rounds: int = 100,
    clients_per_round: int | None = None,
    local: Interval = Epochs(1),  # noqa: B008 - frozen
    batch_size: int | None = 50,
    drop_last: bool = False,
    lr_decay: float = 1.0,
    lr_decay_every: int = 1,
    weight_decay: float = 0.0,
    decoupled_weight_decay: float = 0.0,
    clip_norm: float | None = None,
    weighting: Literal["uniform", "samples"] = "uniform",
    buffers: Literal["average", "recalibrate"] = "average",
    reduce: Mapping[str, str | SlotReduction | Mapping[str, object]] | None = None,
    max_norm_ratio: float | None = MAX_NORM_RATIO,
    min_clients: int = 1,
    observers: Sequence[Observer] = (),
    test: tuple[Samples, Tensor] | None = None,
    measures: Measures | None = None,
    loss: Loss = nn.functional.cross_entropy,
    seed: int = 0,
    engine: str | Callable[[Training], Engine] = "auto",
    device: str | torch.device = "auto",
    dtype: torch.dtype | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: int = 1,
    debug: bool = False,
) -> Result:
    """Train a module over a federation of clients.

    The module passed in is never changed. Only parameters with `requires_grad` are federated. See the documentation for
    every option; `result.metrics[-1].accuracy` is the usual first thing to look at.

    With `run_dir`, metrics are written as the run goes, and the whole state every `checkpoint_every` rounds; with
    `resume` as well, a run that broke off there goes on, bit for bit on a CPU, and one that has not begun starts.

    With `debug`, every client whose reply is refused is trained again, alone on the reference engine, and what is found
    out about it and its data is written to standard error.

    `engine` is a name or, to put one of your own in its place, a function from `Training` to an `Engine`.
    """
    options = Options(
        rounds=rounds,
        clients_per_round=clients_per_round,
        local=local,
        batch_size=batch_size,
        drop_last=drop_last,
        lr_decay=lr_decay,
        lr_decay_every=lr_decay_every,
        weight_decay=weight_decay,
        decoupled_weight_decay=decoupled_weight_decay,
        clip_norm=clip_norm,
        weighting=weighting,
        buffers=buffers,
        reduce=reduce,
        max_norm_ratio=max_norm_ratio,
        min_clients=min_clients,
        loss=loss,
        seed=seed,
        device=device,
        dtype=dtype,
        run_dir=run_dir,
        resume=resume,
        checkpoint_every=checkpoint_every,
    )
    options.check(model, algorithm)
    rounds, seed, run_dir = options.rounds, options.seed, options.run_dir
    check_observers(observers)
    population = as_clients(clients)
    cohort_size = check_cohort(options.clients_per_round, len(population), options.min_clients)
    training = options.training(model, algorithm, population)
    where = training.device
    transform = population.transform if isinstance(population, Population) else None
    test = test if test is not None else getattr(population, "test", None)
    check_measures(measures, test)
    with undisturbed(where), forked_generators(where):
        check_problem(training, test)

    rules = options.rules(algorithm)
    pace = {"clients_per_round": cohort_size, "lr_decay": lr_decay, "lr_decay_every": options.lr_decay_every}
    engine, ranks = join_ranks(engine, where)
    watching = observers if ranks.is_first else ()
    on_refused = Debugger(training) if debug and ranks.is_first else None
    told = debug  # of refused replies: once is enough, and the debugger says more
    if not ranks.is_first:
        run_dir, resume = None, False  # the first rank alone reads, writes and shows
    facts = facts_of(training, population, test, {**pace, "rules": rules}) if run_dir is not None else {}
    with (
        undisturbed(where),
        ranks.watched(),
        Journal(run_dir, resume=resume, every=options.checkpoint_every) as journal,
    ):
        ranks.prepare(training.model, {"algorithm": repr(algorithm), "rounds": rounds, "seed": seed, "options": pace})
        name = engine if isinstance(engine, str) else "auto"
        state = ranks.first(journal.restore(initial_state(training), facts, algorithm.slots.kept, name))
        check_rounds(rounds, state.round)
        chosen, info = _choose(engine, training, cohort_size, journal, state, rounds)
        with closing(chosen), number_of_threads(journal.choices["threads"]):
            for observer in watching:
                observer.on_start(info)
            journal.start(state)
            while state.round < rounds:
                began, t = time.perf_counter(), state.round + 1
                cohort = with_included(sample(len(population), cohort_size, seed, t), observers, t, len(population))
                lr = options.rate(algorithm, t)
                outcome = play_round(state, cohort, lr, chosen, training, rules, _probe(observers, t), on_refused)
                state = outcome.state
                journal.choices["chunk"] = getattr(chosen, "chunk", None)
                evaluating = time.perf_counter()
                evaluation = evaluate_state(state, training, test, transform, ranks, measures)
                outcome.timing["evaluate"] = time.perf_counter() - evaluating
                record = make_record(outcome, evaluation, lr, len(cohort), training, time.perf_counter() - began)
                for observer in watching if outcome.traces else ():
                    observer.on_traces(t, lr, outcome.traces)  # first: a round that is saved is not played again
                record = journal.add(state, record, last=t == rounds)
                stopped = show_round(watching, record, partial(trained_model, model, state, training))
                if record.rejected and not told and ranks.is_first:
                    warnings.warn(_refusal(record), RepliesRefused, stacklevel=2)
                    told = True
                if ranks.first(stopped):
                    break
    with undisturbed(where):
        result = Result(journal.records, named_state(state, training), trained_model(model, state, training), info)
    for observer in watching:
        observer.on_end(result)
    return result


def _choose(
    engine: str | Callable[[Training], Engine],
    training: Training,
    cohort: int,
    journal: Journal,
    state: ServerState,
    rounds: int,
) -> tuple[Engine, RunInfo]:
    """The engine, as asked for or as the run began with, and what is known at the start."""
    before = journal.choices
    if callable(engine):
        chosen, reason = engine(training), "the caller's own"
    else:
        chosen, reason = create_engine(before.get("engine", engine), training, cohort)
    if before.get("chunk") is not None and hasattr(chosen, "chunk"):
        chosen.chunk = before["chunk"]
    journal.choices = before or {"engine": chosen.name, "threads": torch.get_num_threads()}
    info = RunInfo(
        algorithm=type(training.algorithm).__name__,
        engine=chosen.name,
        reason="the run began with it" if before else reason,
        device=str(training.device),
        rounds=rounds,
        first_round=state.round + 1,
        population=len(training.clients),
        clients_per_round=cohort,
        parameters=training.layout.size,
        slots=tuple(starting_slots(training.algorithm, state.slots)),
    )
    return chosen, info


@contextmanager
def number_of_threads(count: int) -> Iterator[None]:
    """Compute with this many threads for a while: sums may round differently with another number of them."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


def initial_state(training: Training) -> ServerState:
    """The server before the first round."""
    parameters = training.layout.flatten(dict(training.model.named_parameters()))
    slots = training.algorithm.init(parameters)
    check_slots(training.algorithm, slots, parameters)
    return ServerState(round=0, slots=slots, buffers=get_buffers(training.model))


def named_state(state: ServerState, training: Training) -> State:
    """The server's slots under the names of the module's parameters."""
    return {
        slot: {name: view.clone() for name, view in training.layout.views(flat).items()}
        for slot, flat in state.slots.items()
    }


def trained_model(model: nn.Module, state: ServerState, training: Training) -> nn.Module:
    """A copy of the caller's module with the server's parameters and buffers, in the caller's training mode."""
    trained = copied(training.model)
    training.layout.load(trained, state.slots.x)
    set_buffers(trained, state.buffers)
    for mine, theirs in zip(trained.modules(), model.modules(), strict=True):
        mine.training = theirs.training
    return trained


def with_included(cohort: Tensor, observers: Sequence[Observer], round: int, population: int) -> Tensor:
    """The sampled cohort with clients that an observer insists on put in place of others; its size stays the same."""
    wanted = sorted({client for observer in observers for client in observer.include(round)})
    if not wanted:
        return cohort
    if len(wanted) > len(cohort) or wanted[-1] >= population or wanted[0] < 0:
        raise ValueError(
            f"clients {wanted} cannot all be put into a cohort of {len(cohort)} of {population} clients, "
            f"which have the numbers 0 to {population - 1}"
        )
    others = [client for client in cohort.tolist() if client not in wanted]
    return torch.tensor(sorted(wanted + others[: len(cohort) - len(wanted)]), device="cpu")


def _refusal(record: Record) -> str:
    client, reason = record.rejected[0]
    others = f", and {len(record.rejected) - 1} more" if len(record.rejected) > 1 else ""
    return (
        f"round {record.round} left out the reply of client {client} ({reason}){others}; "
        f"result.metrics[{record.round - 1}].rejected has all of that round"
    )


def _probe(observers: Sequence[Observer], round: int) -> Probe | None:
    probes = [probe for observer in observers if (probe := observer.probe(round)) is not None]
    if len(probes) > 1:
        raise ValueError(f"{len(probes)} observers want to probe round {round}; at most one can")
    return probes[0] if probes else None


def evaluate_state(
    state: ServerState,
    training: Training,
    test: tuple[Samples, Tensor] | None,
    transform: Transform | None,
    ranks: Ranks = ALONE,
    measures: Measures | None = None,
) -> Evaluation | None:
    """How good the server's model is on the test set, where there is one."""
    if test is None:
        return None
    training.layout.load(training.model, state.slots.x)
    set_buffers(training.model, state.buffers)
    with module_randomness(training, state.round):  # for modules that draw in evaluation mode, too
        return evaluate(
            training.model,
            test,
            training.loss,
            transform=transform,
            compute=training.compute,
            ranks=ranks,
            measures=measures,
        )


def make_record(
    outcome: RoundOutcome, evaluation: Evaluation | None, lr: float, cohort: int, training: Training, seconds: float
) -> Record:
    """A round in numbers. Bytes are those of the table's slots, and apart from them what the module's buffers cost:
    where statistics are measured anew, the new x once more and the statistics a second time."""
    table, state = training.algorithm.slots, outcome.state
    vector = training.layout.size * state.slots.x.element_size()
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in state.buffers.values())
    return Record(
        round=state.round,
        loss=evaluation.loss if evaluation else outcome.train_loss,
        accuracy=evaluation.accuracy if evaluation else None,
        train_loss=outcome.train_loss,
        lr=lr,
        seconds=seconds,
        bytes_up=outcome.replied * len(table.up) * vector,
        bytes_down=cohort * len(table.down) * vector,
        buffer_bytes_up=(outcome.replied + outcome.measured) * buffers,
        buffer_bytes_down=cohort * buffers + outcome.measured * (vector + buffers),
        clients=outcome.accepted,
        rejected=outcome.rejected,
        timing=outcome.timing,
        measures=evaluation.measures if evaluation else {},
    )
