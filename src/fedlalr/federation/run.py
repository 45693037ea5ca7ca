"""`fl.run`: federated training of a module in one call, simulated on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ParamSpec, Protocol

import torch
from torch import Tensor, nn

from fedlalr.algorithms.slots import Algorithm
from fedlalr.common.printable import has_terminal
from fedlalr.data.population import Clients
from fedlalr.federation.asynchronous.clock import Clock
from fedlalr.federation.asynchronous.rounds import run_update
from fedlalr.federation.asynchronous.settings import Async
from fedlalr.federation.debug import Debugger
from fedlalr.federation.evaluation import Score, evaluate_clients
from fedlalr.federation.observers import Observer, RunInfo
from fedlalr.federation.options import Options, documented
from fedlalr.federation.problem import Problem
from fedlalr.federation.replies.screening import Rejection
from fedlalr.federation.result import Result
from fedlalr.federation.round import RoundOutcome, ServerState, run_round
from fedlalr.federation.session import Session, run_info
from fedlalr.federation.stragglers import LONGER, TOO_SLOW, Stragglers, first_arrivals
from fedlalr.training import Engine
from fedlalr.training.engines.auto import estimated_seconds, is_heavy
from fedlalr.training.engines.distributed import join_ranks
from fedlalr.training.engines.registry import create_engine
from fedlalr.training.interfaces import Probe
from fedlalr.training.local_step import starting_slots
from fedlalr.training.machine import warn_if_busy
from fedlalr.training.torch_state import forked_generators, number_of_threads

Names = ParamSpec("Names")


class Run(Protocol[Names]):
    """The type of `run`, for type checkers: its options are those of `Options`."""

    def __call__(
        self,
        model: nn.Module,
        clients: Clients | Sequence[object],
        algorithm: Algorithm,
        *args: Names.args,
        **options: Names.kwargs,
    ) -> Result: ...


def with_options(_: Callable[Names, Options]) -> Callable[[Callable[..., Result]], Run[Names]]:
    """Give a function of `**options` the signature, the help and the type of a class of options."""
    return documented


@with_options(Options)
def run(model: nn.Module, clients: Clients | Sequence[object], algorithm: Algorithm, **options: Any) -> Result:
    """Train a module over a federation of clients.

    The module passed in is never changed. Only parameters with `requires_grad` are federated.
    Start with `result.history[-1].accuracy`.

    Arguments:
        model: Any `torch.nn.Module`.
        clients: `(inputs, targets)` pairs, dicts of tensors, torch or Hugging Face Datasets, or a population such as
            `fl.data.load("cifar10")`.
        algorithm: Such as `fl.FedLALR(lr=2e-3)`.
    """
    chosen = Options.named(options)
    problem = Problem.of(model, clients, algorithm, chosen)
    with _progress(chosen.progress) as display, Session(problem, Simulation(problem), watching=display) as session:
        for _ in session.rounds():
            pass
    return session.result()


def _progress(progress: bool | None) -> AbstractContextManager[Sequence[Observer]]:
    """The progress display; where there is neither a terminal nor a notebook, only on request."""
    may_show = has_terminal() or "IPython" in sys.modules
    if not (may_show if progress is None else progress):
        return nullcontext(())
    from fedlalr.federation.progress import displayed  # here, as runs without a display need no rich

    return displayed(progress)


class Simulation:
    """The transport of `fl.run`: an engine trains the cohort on this machine, or on the ranks that torchrun started."""

    holds_kept = True

    def __init__(self, problem: Problem) -> None:
        self.problem, self.observers = problem, tuple(problem.options.observers)
        self._requested, self.ranks = join_ranks(problem.options.engine, problem.training.device)
        self.engine = self._requested if isinstance(self._requested, str) else "auto"
        self._debugger = Debugger(problem.training) if problem.options.debug and self.ranks.is_first else None
        self._chosen: Engine | None = None
        self._clock: Clock | None = None
        self._sampled: dict[int, Tensor] = {}
        """The cohort of the next round, if it is known."""

    def start(self, state: ServerState, choices: dict[str, Any]) -> RunInfo:
        """Create the engine: as requested, or as the run was started with."""
        training = self.problem.training
        if callable(self._requested):
            chosen, reason = self._requested(training), "created by the caller"
        else:
            with forked_generators(training.device):  # engines try the model and the data
                chosen, reason = create_engine(
                    choices.get("engine", self._requested), training, self.problem.cohort_size
                )
        self._chosen = chosen
        own = callable(self.problem.options.sampling)  # may do anything, so it is called when its round begins
        self._plans_ahead = training.device.type == "cuda" and hasattr(chosen, "plan") and not own
        self._restore_clock(state.round, choices)
        seconds = self._estimate(chosen, state)
        if choices:
            reason = "the run was started with it"
            if choices.get("chunk") is not None and hasattr(chosen, "chunk"):
                chosen.chunk = choices["chunk"]
        else:
            choices |= {"engine": chosen.name, "threads": torch.get_num_threads()}
            if training.device.type == "cpu" and chosen.name != "workers":
                warn_if_busy()
        reason = "; ".join(filter(None, [reason, getattr(training.clients, "note", "")]))
        slots = tuple(starting_slots(training.algorithm, state.slots))
        return replace(run_info(self.problem, state, chosen.name, reason), slots=slots, seconds=seconds)

    def _restore_clock(self, updates: int, choices: dict[str, Any]) -> None:
        """The virtual clock of an asynchronous run after some updates, with the replies in flight."""
        options = self.problem.options
        if isinstance(options.asynchronous, Async):
            assert self.problem.speeds is not None
            self._clock = Clock(self.problem.training, options.sampling, options.asynchronous, self.problem.speeds)
            known = self.ranks.first(choices.get("clock", {"more": [], "unusable": []}))
            self._clock.replay(updates, dict(known["more"]))
            self._clock.unusable = {(version, client): reason for version, client, reason in known["unusable"]}

    def _estimate(self, chosen: Engine, state: ServerState) -> float | None:
        """How long the rest of a heavy run takes on a CPU; None for other runs, and if the caller chose the engine."""
        problem, training = self.problem, self.problem.training
        automatic = self._requested == "auto" and training.device.type == "cpu" and chosen.name != "stacked"
        if not automatic or not is_heavy(training, problem.cohort_size):
            return None
        processes = getattr(chosen, "count", None)  # with one thread each
        with number_of_threads(1 if processes else torch.get_num_threads()):
            each = estimated_seconds(training, problem.cohort_size)
        return each * (problem.options.rounds - state.round) / (processes or 1)

    def run_round(self, state: ServerState, lr: float) -> RoundOutcome:
        """Sample the cohort by (seed, round) and train it with the engine; or run until the next asynchronous
        update."""
        assert self._chosen is not None
        problem, training, t = self.problem, self.problem.training, state.round + 1
        if self._clock is not None:
            reject_chosen_clients(self.observers, t)
            return run_update(state, self._clock, lr, self._chosen, problem.rules, self._debugger)
        sampled = with_included(self._sample(t), self.observers, t, problem)
        cohort, seconds, too_slow = _taken(problem, sampled, t)
        probe = _probe(self.observers, t)
        ahead = partial(self._plan, t + 1) if self._plans_ahead and t < problem.options.rounds else None
        outcome = run_round(state, cohort, lr, self._chosen, training, problem.rules, probe, self._debugger, ahead)
        rejected = tuple(sorted([*outcome.rejected, *too_slow]))
        return replace(outcome, cohort=sampled.tolist(), rejected=rejected, virtual_seconds=seconds)

    def _sample(self, round: int) -> Tensor:
        """The clients sampled for a round, which may be known already."""
        known = self._sampled.pop(round, None)
        return self.problem.cohort(round, self.problem.training.seed) if known is None else known

    def _plan(self, round: int) -> None:
        """Sample and plan the next round while a GPU trains this one. If other clients take part, they are planned
        when it begins."""
        cohort = self._sample(round)
        self._sampled = {round: cohort}
        self._chosen.plan(round, cohort)  # type: ignore[union-attr]

    def evaluate_clients(self, state: ServerState) -> dict[int, Score]:
        """Evaluate every client on this machine, or on its ranks."""
        tests = self.problem.client_tests
        return {} if tests is None else evaluate_clients(self.problem.training, state, tests, self.ranks)

    def recorded(self, choices: dict[str, Any]) -> None:
        """Record the chunk size, which a resumed run must reuse to get the same bits, and what its clock needs."""
        choices["chunk"] = getattr(self._chosen, "chunk", None)
        if self._clock is not None:
            unusable = [[*flight, reason] for flight, reason in self._clock.unusable.items()]
            choices["clock"] = {"more": list(self._clock.more.items()), "unusable": unusable}

    def saved(self) -> None:
        """Nothing to do: the checkpoint holds everything."""

    def close(self) -> None:
        """End the engine's processes."""
        if self._chosen is not None:
            self._chosen.close()


def reject_chosen_clients(observers: Sequence[Observer], update: int) -> None:
    """Reject observers that choose or probe clients of an asynchronous run."""
    for observer in observers:
        if observer.include(update) or observer.probe(update) is not None:
            raise ValueError(
                f"{type(observer).__name__} chooses or probes clients, but in an asynchronous run they start when "
                f"others reply; leave it out, or use synchronous rounds"
            )


def _taken(problem: Problem, sampled: Tensor, round: int) -> tuple[Tensor, float | None, list[Rejection]]:
    """The clients whose replies count, the virtual seconds until then, and those that had nothing to send in time."""
    if problem.speeds is None:
        return sampled, None, []
    given = problem.options.stragglers
    stragglers = given if isinstance(given, Stragglers) else Stragglers()
    steps = replace(problem.training, most_steps=None).steps(round, sampled)
    count = len(sampled) if given is None else problem.cohort_size
    taken, seconds, slow = first_arrivals(sampled, count, steps, problem.speeds[sampled], stragglers)
    rejected = [Rejection(client, TOO_SLOW) for client in slow]
    problem.rules.check_enough(round, len(taken), rejected, f"; {LONGER}" if slow else "")
    return taken, seconds, rejected


def with_included(cohort: Tensor, observers: Sequence[Observer], round: int, problem: Problem) -> Tensor:
    """The sampled cohort with some clients replaced by those that observers require; its size stays the same."""
    wanted = sorted({client for observer in observers for client in observer.include(round)})
    if not wanted:
        return cohort
    population = len(problem.training.clients)
    if problem.rules.mechanism is not None:
        raise ValueError(
            f"an observer requires the clients {wanted} in round {round}, but with privacy every client takes part by "
            f"chance; remove the observer"
        )
    if len(wanted) > len(cohort) or wanted[-1] >= population or wanted[0] < 0:
        raise ValueError(
            f"clients {wanted} do not all fit into a cohort of {len(cohort)} of {population} clients, "
            f"which are numbered 0 to {population - 1}"
        )
    others = [client for client in cohort.tolist() if client not in wanted]
    return torch.tensor(sorted(wanted + others[: len(cohort) - len(wanted)]), device="cpu")


def _probe(observers: Sequence[Observer], round: int) -> Probe | None:
    probes = [probe for observer in observers if (probe := observer.probe(round)) is not None]
    if len(probes) > 1:
        raise ValueError(f"{len(probes)} observers want to probe round {round}; at most one can")
    return probes[0] if probes else None
