"""The round: sample, train, screen, reduce, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots, SlotTable
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.compression.compression import NONE, Compression
from fedlalr.federation.privacy.mechanism import Mechanism, PrivateReduction, seeded_noise
from fedlalr.federation.replies.reducing import reduce_buffers, reduce_replies, weights
from fedlalr.federation.replies.reductions import SlotReduction
from fedlalr.federation.replies.screening import MAX_NORM_RATIO, OnRejected, Rejection, screen
from fedlalr.training.interfaces import Buffers, Engine, Probe, Replies, Trace, Training, Work, real_numbers
from fedlalr.training.personal import (
    first_kept,
    from_clients,
    shared_buffers,
    shared_of,
    shared_slots,
    to_clients,
    with_personal,
    with_shared,
)
from fedlalr.training.ranks import WHOLE
from fedlalr.training.torch_state import module_randomness

DEBUG_HINT = ". Run with debug=True or --debug to train them again one by one and see what is in their data"


class RoundFailed(RuntimeError):
    """Too few usable replies, or an update that is not finite. The server's state is as it was before the round."""

    def __init__(self, message: str, rejected: Sequence[Rejection] = ()) -> None:
        super().__init__(message)
        self.rejected = tuple(rejected)
        """The rejected replies that made it fail."""


@dataclass(frozen=True)
class ServerState:
    """Everything that is passed from one round to the next. A new value every round; nothing is changed in place."""

    round: int
    """Completed rounds."""
    slots: Slots
    buffers: Buffers
    kept: Mapping[int, Slots] = field(default_factory=dict)
    """What each client keeps that has taken part: see `training/personal.py`."""


@dataclass(frozen=True)
class Rules:
    """How the server treats the cohort's replies."""

    weighting: str = "uniform"
    min_clients: int = 1
    reduce: Mapping[str, SlotReduction] = field(default_factory=dict)
    """Reductions that differ from the algorithm's, by slot, and that of buffers if they are not averaged."""
    max_norm_ratio: float | None = MAX_NORM_RATIO
    compression: Compression = NONE
    mechanism: Mechanism | None = None
    """With privacy: how replies are clipped and noised."""

    @property
    def least(self) -> int:
        """The fewest usable replies with which a round does not fail. With privacy, a round without any is valid."""
        return self.min_clients if self.mechanism is None else 0

    def check_enough(self, round: int, accepted: int, rejected: Sequence[Rejection], advice: str = "") -> None:
        """Fail a round with too few usable replies."""
        if accepted < self.least:
            raise RoundFailed(too_few(round, accepted, self.least, rejected) + advice, rejected)

    def screening(self, table: SlotTable) -> tuple[SlotTable, float | None]:
        """By which slots and which ratio replies are screened. With privacy each reply is screened alone, and may be
        below a broadcast that noise has raised."""
        return (table, self.max_norm_ratio) if self.mechanism is None else (replace(table, grows=()), None)


@dataclass(frozen=True)
class RoundOutcome:
    """A round that succeeded."""

    state: ServerState
    cohort: Sequence[int]
    replied: int
    accepted: int
    rejected: tuple[Rejection, ...]
    train_loss: float
    traces: tuple[Trace, ...]
    timing: dict[str, float]
    measured: int = 0
    """Clients that recalibrated their statistics with the new x."""
    clipped: tuple[int, ...] = ()
    """Clients whose change was too long and was shortened."""
    epsilon: float | None = None
    """The privacy spent up to this round."""
    virtual_seconds: float | None = None
    """Time on the virtual clock, if the run has one."""
    staleness: float | None = None
    """In an asynchronous run: how many updates old the replies' versions were, on average."""


def run_round(
    state: ServerState,
    cohort: Tensor,
    lr: float,
    engine: Engine,
    training: Training,
    rules: Rules,
    probe: Probe | None = None,
    on_rejected: OnRejected | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> RoundOutcome:
    """One round with the given cohort. The state passed in is never changed, so it is still valid on `RoundFailed`.

    `on_rejected` is called with the rejected replies before the round continues or fails, `meanwhile` while a GPU may
    still be training.
    """
    clock, mechanism = Stopwatch(), rules.mechanism
    epsilon = None if mechanism is None else mechanism.spend(state.round + 1)
    channel = Channel.of(rules.compression, training, state.round + 1)
    work = work_of(state, cohort, lr, training, channel, probe)
    if mechanism is not None:
        work = replace(work, cohort=mechanism.cohort)
    given = to_clients(work, training)
    with module_randomness(training, work.round):
        trained = engine.train(given) if len(cohort) else Replies.empty(given, training)
        if meanwhile is not None:
            meanwhile()
        replies = from_clients(trained, work, training)
    replies = channel.replies(replies, work.broadcast, state.kept)
    clock.lap("train")

    table, ratio = rules.screening(channel.table)
    accepted, rejected, clipped = screen(replies, work.broadcast, table, buffers=work.buffers, max_norm_ratio=ratio)
    if rejected and on_rejected is not None:
        on_rejected(given, rejected)
    rules.check_enough(work.round, len(accepted.clients), rejected, DEBUG_HINT if on_rejected is None else "")
    clock.lap("screen")

    new = _reduce(state, work, accepted, training, rules, channel)
    measures = training.buffers == "recalibrate" and bool(new.buffers)
    if measures:
        buffers, unusable, long = _recalibrated(new, accepted, engine, training, rules)
        new = replace(new, buffers=buffers)
        rejected, clipped = tuple(sorted([*rejected, *unusable])), tuple(sorted({*clipped, *long}))
        if unusable and on_rejected is not None:
            on_rejected(given, unusable)
    clock.lap("reduce")
    return RoundOutcome(
        state=new,
        cohort=cohort.tolist(),
        replied=len(replies.clients),
        accepted=len(accepted.clients),
        rejected=rejected,
        clipped=clipped,
        train_loss=float(accepted.losses.double().nanmean()),
        traces=replies.traces,
        timing=clock.laps,
        measured=len(accepted.clients) if measures else 0,
        epsilon=epsilon,
    )


def work_of(
    state: ServerState, cohort: Tensor, lr: float, training: Training, channel: Channel, probe: Probe | None = None
) -> Work:
    """The server's view of a round."""
    return Work(
        round=state.round + 1,
        lr=lr,
        clients=cohort,
        broadcast=channel.broadcast(shared_slots(training, state.slots.only(*training.algorithm.slots.down))),
        buffers=shared_buffers(training, state.buffers),
        kept=_kept(state, cohort, training),
        cohort=len(cohort),
        population=len(training.clients),
        probe=probe,
        shapes=training.shapes,
    )


def _reduce(
    state: ServerState, work: Work, accepted: Replies, training: Training, rules: Rules, channel: Channel
) -> ServerState:
    """The server's next state from the accepted replies; `RoundFailed` if it is not finite."""
    server = shared_slots(training, state.slots)
    with torch.no_grad():
        if rules.mechanism is not None:
            noise = seeded_noise(training.seed, work.round)
            private = PrivateReduction(rules.mechanism, training, channel, work, server, noise)
            private.add(accepted.slots, accepted.buffers)
            reduced, buffers = private.release(accepted.spread.ranks)
            steps, share = private.steps, private.share
        else:
            steps, share = accepted.steps, _share(accepted, training, rules)
            how = rules.reduce
            reduced, buffers = reduce_replies(accepted, work.broadcast, work.buffers, share, channel.table, how)
            reduced = channel.rebased(reduced, work.broadcast, server)
    slots = update_slots(state, work, reduced, steps, share, training)
    theirs = _kept_after(accepted, work, training).map(accepted.spread.gather)
    kept = {**state.kept, **(by_client(theirs, accepted.clients) if theirs else {})}
    return ServerState(round=work.round, slots=slots, buffers=buffers or state.buffers, kept=kept)


def _kept_after(accepted: Replies, work: Work, training: Training) -> Slots:
    """What the accepted clients keep. A slot that follows an upload changes by what is left of it after codecs and
    clipping."""
    if training.algorithm.slots.follows is None:
        return accepted.kept
    name, sent = training.algorithm.slots.follows
    rows = torch.searchsorted(work.clients, accepted.spread.mine(accepted.clients))
    before = shared_of(training, work.kept, name)
    after = before[rows.to(before.device)] + accepted.slots[sent]
    return with_shared(training, accepted.kept, name, after)


def by_client(stacks: Slots, clients: Tensor) -> dict[int, Slots]:
    """Each client's row of some stacks, in memory of its own."""
    rows = enumerate(clients.tolist())
    return {client: Slots(**{name: stack[row].clone() for name, stack in stacks.items()}) for row, client in rows}


def _recalibrated(
    new: ServerState, accepted: Replies, engine: Engine, training: Training, rules: Rules
) -> tuple[Buffers, tuple[Rejection, ...], tuple[int, ...]]:
    """The buffers that clients measure with the new model, screened and reduced like those of a reply; and the clients
    whose buffers were rejected or clipped."""
    with module_randomness(training, new.round):
        statistics = engine.recalibrate(new.slots.x, new.buffers, accepted.clients, new.round)
    # Layers count their batches from zero, so integers are not compared with the server's.
    before = {name: buffer for name, buffer in new.buffers.items() if real_numbers(buffer).is_floating_point()}
    measured = replace(accepted, slots=Slots(), buffers=statistics, kept=Slots(), failures={}, spread=WHOLE)
    table, ratio = training.algorithm.slots, rules.max_norm_ratio
    usable, unusable, clipped = screen(measured, new.slots, table, buffers=before, max_norm_ratio=ratio)
    rejected = tuple(Rejection(client, f"recalibrated {reason}") for client, reason in unusable)
    overflow = ". If the new model overflows on their data, lower the learning rates"
    rules.check_enough(new.round, len(usable.clients), rejected, overflow)
    share = _share(usable, training, rules)
    return reduce_buffers(usable.buffers, share, rules.reduce, new.buffers), rejected, clipped


def update_slots(
    state: ServerState, work: Work, reduced: Slots, steps: Tensor, share: Tensor, training: Training
) -> Slots:
    """The server's slots after the algorithm's update; `RoundFailed` if not finite. `steps` and `share` are `[R]`.

    Personal coordinates stay at their initial values.
    """
    algorithm = training.algorithm
    context = Context(
        round=work.round,
        lr=work.lr,
        steps=float((steps.double() * share.double().cpu()).sum()),
        cohort=len(steps),
        population=work.population,
    )
    before = shared_slots(training, state.slots)
    with torch.no_grad():
        slots = algorithm.update(before, reduced, context)
    for name, slot in before.items():
        given = slots.get(name) if isinstance(slots, Slots) else None  # it may lack its return
        if given is None or (given.shape, given.dtype) != (slot.shape, slot.dtype):
            raise ValueError(
                f"{type(algorithm).__name__}.update must return all of the server's slots ({', '.join(before)}), in "
                f"their shape and dtype, but it returns "
                + (f"no {name}" if given is None else f"{name} as {list(given.shape)}, {given.dtype}")
            )
    check_finite(slots, work.round, f"after the update of {type(algorithm).__name__}")
    return with_personal(training, slots, state.slots)


def check_finite(tensors: Mapping[str, Tensor], round: int, when: str) -> None:
    """Fail a round before a state that is not finite is used or saved."""
    finite = {name: torch.isfinite(torch.stack(tensor.aminmax())).all() for name, tensor in tensors.items()}
    if finite and not torch.stack(list(finite.values())).all():  # all at once, to synchronise with a GPU only once
        name = next(name for name, whether in finite.items() if not whether)
        raise RoundFailed(
            f"round {round}: the server's {name} would no longer be finite {when}; "
            f"lower the learning rates (the state before the round is kept)"
        )


def _share(accepted: Replies, training: Training, rules: Rules) -> Tensor:
    return weights(accepted.samples, rules.weighting, training.layout.dtype, training.device)


def _kept(state: ServerState, cohort: Tensor, training: Training) -> Slots:
    """Everything that the cohort's clients keep, stacked."""
    first = first_kept(training, state.slots, state.buffers)
    rows = [state.kept.get(client, first) for client in cohort.tolist()]
    if not rows:
        return first.map(lambda tensor: tensor[None][:0])
    return Slots(**{name: torch.stack([row[name] for row in rows]) for name in first})


def too_few(round: int, accepted: int, wanted: int, rejected: Sequence[Rejection]) -> str:
    """Why a round failed, with the clients that were rejected."""
    reasons = list(_grouped(rejected))
    more = f"; and {len(reasons) - 10} more" if len(reasons) > 10 else ""
    shown = "; ".join(reasons[:10]) + more
    return f"round {round}: {accepted} usable replies, but min_clients is {wanted}. Rejected: {shown}"


def _grouped(rejected: Sequence[Rejection]) -> Iterator[str]:
    """Every rejection; three or more clients with the same reason are grouped."""
    by_reason: dict[str, list[int]] = {}
    for client, reason in rejected:
        by_reason.setdefault(reason, []).append(client)
    for client, reason in rejected:
        alike = by_reason[reason]
        if len(alike) < 3:
            yield f"client {client}: {reason}"
        elif client == alike[0]:
            some = ", ".join(map(str, alike[:5])) + (", …" if len(alike) > 5 else "")
            yield f"{len(alike)} clients ({some}): {reason}"


class Stopwatch:
    """Seconds spent between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now
