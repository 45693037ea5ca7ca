"""An asynchronous update: train the clients that start, and reduce the replies that arrive.

Reply i with upload u_i started from the server's value b_i, which is s_i updates old; the server's is now c. The
replies of a buffer have the weights w_i (as in a synchronous round, summing to one), and count with w_i (1 + s_i)^-½:

    the model:                  x ← x + Σ w_i (1 + s_i)^-½ (u_i − b_i)
    a slot that only grows:     c ← c + Σ w_i (1 + s_i)^-½ max(u_i − c, 0)
    another broadcast slot:     c ← c + Σ w_i (1 + s_i)^-½ (u_i − c)
    a slot that is only sent:   Σ w_i (1 + s_i)^-½ u_i

then the algorithm's `update`. If no reply is stale, this is the synchronous round.

Changes of the model are progress: those of two clients that started from the same version both count. The momentum m
and v̂ are estimates: two clients that report the same rise have seen one rise. After many local steps m_i no longer
depends on the m it started from, so if changes of m were added like those of x, every update would subtract the m of s
updates ago: m ← m + (1 + s)^-½ (fresh − m_before), which for s ≥ 3 oscillates and grows without bound. v̂, which never
shrinks, would count the rise after the first version once in every update. So m is moved towards the replies, and v̂
raised to them. A stale reply never lowers v̂: no client starts from a v̂ below one that was broadcast before.

A client is trained when it starts, together with all others that start from the same version. Until its reply arrives
it is stored with what the client keeps, as changes from its version, so no old versions are needed:

    reply.x, reply.m, …         its upload; of x the change
    reply.buffer.running_mean   its buffers; of integers the change
    reply.steps                 its K; 0 if it has nothing to send
    reply.samples, reply.loss   its number of samples and its training loss

A reply that cannot be used does not count: when it arrives it is recorded as rejected, and the server waits for another
one. If nobody trains any more and nobody is left to start, an update takes the replies it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.federation.asynchronous.clock import Clock, Period
from fedlalr.federation.asynchronous.settings import Async
from fedlalr.federation.compression.channel import Channel
from fedlalr.federation.replies.reducing import reduce_replies, weights
from fedlalr.federation.replies.screening import OnRejected, Rejection, screen
from fedlalr.federation.round import RoundOutcome, Rules, ServerState, Stopwatch, by_client, update_slots, work_of
from fedlalr.training.interfaces import Buffers, Engine, Replies, Training, Work, named
from fedlalr.training.personal import from_clients, shared_buffers, shared_slots, to_clients
from fedlalr.training.ranks import WHOLE
from fedlalr.training.torch_state import module_randomness

REPLY = "reply."
"""Prefix of the names under which a reply is stored until it arrives."""
_BUFFER, _SAMPLES, _STEPS, _LOSS = "buffer.", "samples", "steps", "loss"


def no_reply(training: Training, slots: Slots, buffers: Buffers) -> Slots:
    """What is stored of the reply of a client that has nothing to send."""
    x = shared_slots(training, slots.only("x")).x
    row = {REPLY + name: torch.zeros_like(x) for name in training.algorithm.slots.up}
    for name, buffer in shared_buffers(training, buffers).items():
        row[REPLY + _BUFFER + name] = torch.zeros_like(buffer)
    row[REPLY + _SAMPLES] = row[REPLY + _STEPS] = torch.zeros((), dtype=torch.int64, device="cpu")
    row[REPLY + _LOSS] = torch.zeros((), dtype=torch.float64, device="cpu")
    return Slots(**row)


def run_update(
    state: ServerState, clock: Clock, lr: float, engine: Engine, rules: Rules, on_rejected: OnRejected | None
) -> RoundOutcome:
    """One update of the server. The state passed in is never changed, so it is still valid on `RoundFailed`."""
    watch, training, asynchronous = Stopwatch(), clock.training, clock.asynchronous
    channel = Channel.of(rules.compression, training, state.round + 1)
    period, fresh, trained = clock.advance(), dict[int, Slots](), set[int]()
    unusable = clock.unusable
    while True:
        starting = period.started[[client not in trained for client in period.started.tolist()]]
        work = replace(work_of(state, starting, lr, training, channel), cohort=asynchronous.buffer)
        some, rejected = _train(state, work, engine, training, channel, on_rejected)
        fresh |= some
        trained.update(starting.tolist())
        unusable |= {(state.round, client): reason for client, reason in rejected}
        lost = [each for each in period.arrived if (each.version, each.client) in unusable]
        missing = asynchronous.buffer - (len(period.arrived) - len(lost))
        longer = clock.extend(missing) if missing else period
        if len(longer.arrived) == len(period.arrived):
            break
        period = longer
    watch.lap("train")
    reasons = [Rejection(each.client, unusable[each.version, each.client]) for each in lost]
    arrived = _arrived(period, state, fresh)
    work = replace(work, clients=period.started)
    outcome = reduce_arrived(state, work, arrived, reasons, training, rules, asynchronous, watch)
    new = replace(outcome.state, kept=_kept(state, period, fresh, training))
    return replace(outcome, state=new, virtual_seconds=period.seconds)


def reduce_arrived(
    state: ServerState,
    work: Work,
    arrived: Sequence[tuple[int, int, Slots]],
    rejected: Sequence[Rejection],
    training: Training,
    rules: Rules,
    asynchronous: Async,
    clock: Stopwatch,
) -> RoundOutcome:
    """Update the server with replies: client, version and what is stored of each. `work` is that of the clients that
    started; `rejected` are those whose replies cannot be used."""
    rules.check_enough(work.round, len(arrived), rejected)
    table, ids = training.algorithm.slots, [client for client, _, _ in arrived]
    current = shared_slots(training, state.slots.only(*table.down))
    replies = _rebased([row for _, _, row in arrived], current, work.buffers, training)
    ratio = rules.max_norm_ratio
    accepted, unusable, clipped = screen(replies, current, table, buffers=work.buffers, max_norm_ratio=ratio)
    rejected = tuple(sorted([*rejected, *(Rejection(ids[place], reason) for place, reason in unusable)]))
    rules.check_enough(work.round, len(accepted.clients), rejected)
    clock.lap("screen")

    ages = torch.tensor([state.round - arrived[place][1] for place in accepted.clients.tolist()], device="cpu")
    share = weights(accepted.samples, rules.weighting, torch.float64, torch.device("cpu"))
    fresher = (share * (1.0 + ages.double()) ** -asynchronous.staleness).to(training.layout.dtype).to(training.device)
    with torch.no_grad():
        reduced, buffers = reduce_replies(accepted, current, work.buffers, fresher, table)
    slots = update_slots(state, work, reduced, accepted.steps, share, training)
    threshold, oldest = asynchronous.delay_threshold, int(ages.max())
    if threshold is not None and oldest > threshold:
        rate = getattr(training.algorithm, "server_lr", 1.0)
        part = min(rate, 1 / oldest) / rate  # x moves in proportion to the server's rate
        slots = slots.replace(x=state.slots.x + part * (slots.x - state.slots.x))
    clock.lap("reduce")
    return RoundOutcome(
        state=ServerState(round=work.round, slots=slots, buffers=buffers or state.buffers),
        cohort=work.clients.tolist(),
        replied=len(arrived),
        accepted=len(accepted.clients),
        rejected=rejected,
        clipped=tuple(sorted({ids[place] for place in clipped})),
        train_loss=float(accepted.losses.nanmean()),
        traces=(),
        timing=clock.laps,
        staleness=float(ages.double().mean()),
    )


def _train(
    state: ServerState, work: Work, engine: Engine, training: Training, channel: Channel, on_rejected: OnRejected | None
) -> tuple[dict[int, Slots], tuple[Rejection, ...]]:
    """What each client that starts will keep, with its reply; and those whose replies cannot be used."""
    if not len(work.clients):
        return {}, ()
    given = to_clients(work, training)
    with module_randomness(training, work.round):
        replies = from_clients(engine.train(given), work, training)
    replies = _whole(channel.replies(replies, work.broadcast, state.kept))
    usable, rejected, _ = screen(replies, work.broadcast, channel.table, buffers=work.buffers, max_norm_ratio=None)
    if rejected and on_rejected is not None:
        on_rejected(given, rejected)
    return stored(usable, work, channel, shared_slots(training, state.slots)), rejected


def stored(usable: Replies, work: Work, channel: Channel, server: Slots) -> dict[int, Slots]:
    """What is stored of each reply, with what its client will keep. `server` are the slots that it started from."""
    slots = channel.rebased(usable.slots, work.broadcast, server)
    if "x" in slots:
        slots = slots.replace(x=usable.slots.x - work.broadcast.x)
    stacks = {REPLY + name: stack for name, stack in slots.items()}
    for name, buffer in usable.buffers.items():
        stacks[REPLY + _BUFFER + name] = buffer - work.buffers[name] if _is_count(buffer) else buffer
    stacks |= {REPLY + _SAMPLES: usable.samples, REPLY + _STEPS: usable.steps}
    stacks[REPLY + _LOSS] = usable.losses.double().cpu()
    return by_client(usable.kept.replace(**stacks), usable.clients)


def _whole(replies: Replies) -> Replies:
    """The replies with all rows in this process: they will arrive in other groups than they started in."""
    if replies.spread.is_whole:
        return replies
    gather = replies.spread.gather
    buffers = {name: gather(buffer) for name, buffer in replies.buffers.items()}
    slots, kept = replies.slots.map(gather), replies.kept.map(gather)
    return replace(replies, slots=slots, buffers=buffers, kept=kept, spread=WHOLE)


def _arrived(period: Period, state: ServerState, fresh: Mapping[int, Slots]) -> list[tuple[int, int, Slots]]:
    """The replies that arrived, in the order of clients and versions, except those that were rejected."""
    found = []
    for client, version in sorted((flight.client, flight.version) for flight in period.arrived):
        row = (fresh if version == state.round else state.kept).get(client)
        if row is not None and int(row[REPLY + _STEPS]):
            found.append((client, version, row))
    return found


def _rebased(rows: Sequence[Slots], current: Slots, buffers: Buffers, training: Training) -> Replies:
    """Stored replies as changes of the current version. Their places take the place of ids, since a client may be
    among them twice."""
    replies = {name: torch.stack([row[REPLY + name] for row in rows]) for name in named(rows[0], REPLY)}
    table = training.algorithm.slots
    slots = {name: replies[name] for name in table.up}
    if "x" in slots:
        slots["x"] = current.x + slots["x"]
    for name in table.grows:
        slots[name] = torch.maximum(slots[name], current[name])
    theirs = named(replies, _BUFFER)
    return Replies(
        clients=torch.arange(len(rows), device="cpu"),
        samples=replies[_SAMPLES],
        steps=replies[_STEPS],
        losses=replies[_LOSS],
        slots=Slots(**slots),
        buffers={name: buffers[name] + each if _is_count(each) else each for name, each in theirs.items()},
        kept=Slots(),
    )


def _is_count(buffer: Tensor) -> bool:
    """Whether a buffer holds integers, such as a number of batches."""
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool)


def _kept(state: ServerState, period: Period, fresh: Mapping[int, Slots], training: Training) -> dict[int, Slots]:
    """What clients keep after the update, with the replies of those that still train."""
    nothing = no_reply(training, state.slots, state.buffers)
    kept = dict(state.kept)
    for client in {*period.started.tolist(), *(flight.client for flight in period.arrived)}:
        row = fresh.get(client, kept.get(client))
        if client in fresh and client in period.training:
            kept[client] = fresh[client]
        elif row is not None and len(row) > len(nothing):
            kept[client] = row.replace(**nothing)
        else:
            kept.pop(client, None)
    return kept
