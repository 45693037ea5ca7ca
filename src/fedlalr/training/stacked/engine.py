"""The stacked engine: the cohort as one batched computation.

Parameters, buffers and slots of C clients are tensors `[C, …]`; the algorithm's own `step` runs on the stack unchanged.
Clients of different sizes are padded and masked, clients with fewer steps leave the stack when they are done, and
cohorts that do not fit into memory are split into chunks. The result equals the reference engine's.

Dropout draws separately for every client from torch's generator: repeatable, but not the reference engine's draws.
"""

from __future__ import annotations

import warnings
from functools import cached_property, partial

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots
from fedlalr.data.population import Population
from fedlalr.data.trees import map_tree
from fedlalr.training.accumulation import has_single
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.fused_steps import fused_step, fused_update
from fedlalr.training.interfaces import Buffers, Replies, Trace, Training, Work, joined
from fedlalr.training.local_step import check_unwritten, finish, local_step, other_gradients, without_drawing
from fedlalr.training.memory import fitting_clients, is_out_of_memory, keep_freed_memory
from fedlalr.training.stacked.cuda_graphs import StaticSteps, draws, keeps_its_slots
from fedlalr.training.stacked.feed import Feed
from fedlalr.training.stacked.forms.convmixer import ConvMixerForm
from fedlalr.training.stacked.gradient import AccumulatedGradient, Batch, ForwardGradient, gradient_at
from fedlalr.training.stacked.linear import LinearGradient
from fedlalr.training.stacked.linear_rounds import LinearRounds
from fedlalr.training.stacked.stack import Stack, stacked
from fedlalr.training.stacked.statistics import stacked_statistics
from fedlalr.training.stacked.trial import choose_gradient
from fedlalr.training.stacked.vmap import VmapForward
from fedlalr.training.torch_internals import write_counts


class StackedEngine:
    """Trains the cohort as a stack. Raises `CannotStack` for what it could not train as the reference engine does."""

    name = "stacked"

    def __init__(self, training: Training) -> None:
        self.training = training
        self._gradient = choose_gradient(training)
        self._forward = self._gradient.forward if isinstance(self._gradient, ForwardGradient) else None
        if training.accumulate > 1 and training.batch_size is not None:
            self._gradient = AccumulatedGradient(training, self._gradient, training.batch_size)
        self._others = training.algorithm.slots.gradients
        self._fused = fused_step(training.algorithm, training.device, training.layout.dtype)
        self._reference = ReferenceEngine(training)
        self._static = self._static_steps()
        self._linear = self._linear_rounds()
        if training.device.type == "cpu":
            keep_freed_memory()
        self._planned: Feed | None = None
        self.chunk: int | None = None
        """How many clients are trained at once, as soon as it is known. A resumed run sets the original value."""
        self._stack_error: str | None = None
        """An error that a stack of this round raised but its clients did not raise on their own."""

    def _static_steps(self) -> StaticSteps | None:
        """Steps in fixed memory for CUDA graphs, if the data are on a GPU and the slots can be written in place."""
        training = self.training
        params = training.layout.flatten(dict(training.model.named_parameters()))
        on_gpu = training.device.type == "cuda" and isinstance(training.clients, Population)
        if not on_gpu or not keeps_its_slots(training, params):
            return None
        if self._others and draws(training):
            return None  # a replay cannot draw the same numbers again for a second gradient
        return StaticSteps(training, self._gradient, self._fused, capture=True)

    def _linear_rounds(self) -> LinearRounds | None:
        """The form for small chains of linear layers on a CPU, if the network is one and the step has a fused form."""
        update = fused_update(self.training.algorithm)
        on_cpu = self.training.device.type == "cpu"
        if not on_cpu or not isinstance(self._gradient, LinearGradient) or update is None:
            return None
        if update.aligned or not update.uniform:
            return None  # d and the counts are not stored layer by layer
        return LinearRounds(self.training, self._gradient, update)

    def train(self, work: Work) -> Replies:
        before = write_counts(work.broadcast)
        rows = torch.split(torch.arange(len(work.clients), device="cpu"), self._chunk_size(work))
        self._stack_error = None
        replies = Replies.cat([self._train_part(work.part(some), sole=len(rows) == 1) for some in rows])
        check_unwritten(self.training.algorithm, work.broadcast, before)
        if self._stack_error is not None and not replies.failures:
            _warn(
                f"round {work.round}: the clients were trained in smaller stacks, which is slower, because a stack "
                f"of them raised {self._stack_error}"
            )
        return replies

    def plan(self, round: int, clients: Tensor) -> None:
        """Plan the batches of a coming round on the host, while a GPU is still training."""
        feed = Feed(self.training, round, clients)
        if feed.is_small:
            self._planned = feed
            feed.positions  # noqa: B018  computed on first use

    def _chunk_size(self, work: Work) -> int:
        if len(work.clients) <= 2:
            return len(work.clients)
        if self.chunk is None:
            each = self._gradient.bytes_each() if isinstance(self._gradient, LinearGradient) else None
            self.chunk = fitting_clients(self.training, work, partial(self._train_chunk, steps=1), each)
        return self.chunk

    def _train_part(self, work: Work, *, sole: bool = False) -> Replies:
        """Train some clients; if that raises, retry with fewer, down to single clients on the reference engine.

        So a chunk that does not fit into memory is halved, and a client whose data or module raises is identified while
        the others keep training.
        """
        try:
            return self._train_chunk(work, sole=sole)
        except Exception as error:
            out_of_memory, reason = is_out_of_memory(error), f"{type(error).__name__}: {error}"
        if self._static is not None:
            self._static.forget()
        if len(work.clients) > 1:
            if out_of_memory:
                self.chunk = len(work.clients) // 2
            else:
                self._stack_error = reason
            halves = torch.arange(len(work.clients), device="cpu").chunk(2)
            return Replies.cat([self._train_part(work.part(half)) for half in halves])
        replies = self._reference.train(work)
        if not replies.failures:
            self._stack_error = None  # the next warning says it all
            _warn(
                f"round {work.round}: client {int(work.clients[0])} was trained by the reference engine, because the "
                f"stacked engine raised {reason}"
            )
        return replies

    @torch.no_grad()
    def _train_chunk(self, work: Work, steps: int | None = None, *, sole: bool = False) -> Replies:
        """Train clients as one stack; only their first `steps` steps, if given. If they are the round's `sole` chunk,
        the replies may stay in the stack's memory, which nothing else needs before they are used."""
        planned, self._planned = self._planned, None
        if planned is not None and planned.is_for(work.round, work.clients):
            feed = planned
        else:
            feed = Feed(self.training, work.round, work.clients)
        if isinstance(self._forward, VmapForward) and self._forward.needs_two_samples:
            alone = torch.zeros(len(work.clients), dtype=torch.bool, device="cpu")
            alone[feed.order] = has_single(feed.counts, self.training.batch_size).any(0)
            if alone.any():
                return self._set_aside(work, alone)
        if work.kept or work.per_client:
            work = work.part(feed.order)
        if self._static is not None and work.probe is None and steps is None:
            stack = self._static.run(work, feed, self._start(work, feed))
            return self._replies(work, feed, stack, [], owned=sole)
        stack, tables = self._start(work, feed), feed.tables()
        if self._linear is not None and tables is not None and work.probe is None and steps is None:
            return self._replies(work, feed, self._linear.run(feed, tables, stack, work), [])
        if self._fused is not None:
            stack = stack.own()
        finished: list[Stack] = []
        traces: list[Trace] = []
        for k, shape in enumerate(feed.shapes()[:steps], start=1):
            if shape.active < stack.size:
                finished.append(stack.rows(shape.active, stack.size))
                stack = stack.rows(0, shape.active)
            batch = feed.collate(k, shape) if tables is None else tables.batch(k, shape)
            context = work.context(steps=self._steps(feed.steps[: shape.active]), step=k)
            stack = self._advance(stack, batch, work.of(slice(shape.active))[0], context)
            if work.probe is not None:
                traces += _probe(work, feed, stack, k)
        return self._replies(work, feed, stack.join(finished), traces)

    def _advance(self, stack: Stack, batch: Batch, broadcast: Slots, context: Context) -> Stack:
        """One local step of the stack."""
        training, state = self.training, stack.state
        if self._others:
            at = without_drawing(gradient_at(self._gradient, stack.buffers, batch), training.device)
            state = state.replace(**other_gradients(training, self._others, state, at))
        losses, gradient, buffers = self._gradient(state.x, stack.buffers, batch)
        total = stack.total + losses
        if self._fused is None:
            new = local_step(training, state, gradient, broadcast, context)  # may lack the client dimension
            return Stack(new.map(lambda slot: stacked(slot, stack.size)), buffers, total)
        self._fused(state, gradient, broadcast, context, training.regularisation)
        return Stack(state, buffers, total)

    def _set_aside(self, work: Work, alone: Tensor) -> Replies:
        """Leave clients with a batch of one sample to the reference engine, where BatchNorm rejects them by name."""
        with torch.enable_grad():  # otherwise they would fail for another reason
            parts = [self._reference.train(work.part(torch.nonzero(alone).flatten()))]
        if not alone.all():
            parts.append(self._train_chunk(work.part(torch.nonzero(~alone).flatten())))
        return Replies.cat(parts)

    def _start(self, work: Work, feed: Feed) -> Stack:
        training, count = self.training, len(feed.clients)
        state = training.algorithm.start(work.broadcast, work.kept).map(lambda tensor: stacked(tensor, count))
        buffers = map_tree(lambda buffer: buffer.expand(count, *buffer.shape[work.per_client :]).clone(), work.buffers)
        total = torch.zeros(count, device=training.device, dtype=training.layout.dtype)
        return Stack(state, buffers, total)

    def _steps(self, steps: Tensor) -> int | Tensor:
        """K for the algorithm's context: a number if all clients agree, else `[C, 1]`."""
        if steps[0] == steps[-1]:
            return int(steps[0])
        return steps.to(self.training.device, self.training.layout.dtype)[:, None]

    def _replies(self, work: Work, feed: Feed, stack: Stack, traces: list[Trace], owned: bool = True) -> Replies:
        """The replies of a stack's clients; copied unless the stack's memory is `owned` by the caller."""
        training, count = self.training, len(feed.clients)
        context = work.context(steps=self._steps(feed.steps), step=self._steps(feed.steps))
        upload, kept = finish(training, stack.state, work.broadcast, context)
        if not owned:
            upload, kept = upload.map(Tensor.clone), kept.map(Tensor.clone)
            stack = Stack(stack.state, {name: buffer.clone() for name, buffer in stack.buffers.items()}, stack.total)
        replies = Replies(
            clients=feed.clients,
            samples=training.clients.sizes[feed.clients],
            steps=feed.steps,
            losses=stack.total / feed.steps_there,
            slots=upload.map(lambda tensor: stacked(tensor, count)),
            buffers=stack.buffers,
            kept=kept.map(lambda tensor: stacked(tensor, count)),
            traces=tuple(sorted(traces, key=lambda trace: trace[:2])),
        )
        in_order = torch.equal(feed.order, torch.arange(count, device="cpu"))
        return replies if in_order else replies.rows(feed.order.argsort())

    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        if not isinstance(self.training.clients, Population) or self._statistics is None:
            return self._reference.recalibrate(x, buffers, clients, round)
        chunks = torch.split(clients, self.chunk or len(clients))
        return joined([self._recalibrate_part(x, buffers, some, round) for some in chunks])

    def _recalibrate_part(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        """Statistics of some clients; if memory runs out, fewer at once; on other errors, by the reference engine."""
        assert self._statistics is not None
        try:
            return stacked_statistics(self._statistics, self.training, x, buffers, clients)
        except Exception as error:
            out_of_memory, reason = is_out_of_memory(error), f"{type(error).__name__}: {error}"
        if out_of_memory and len(clients) > 1:
            return joined([self._recalibrate_part(x, buffers, half, round) for half in clients.chunk(2)])
        alone = self._reference.recalibrate(x, buffers, clients, round)
        _warn(
            f"round {round}: the statistics of {len(clients)} clients were computed by the reference engine, because "
            f"the stacked engine raised {reason}"
        )
        return alone

    @cached_property
    def _statistics(self) -> VmapForward | ConvMixerForm | None:
        """The network for statistics, or None if it has a custom BatchNorm subclass."""
        if isinstance(self._forward, ConvMixerForm):
            return self._forward
        forward = VmapForward(self.training.model)
        return forward if forward.knows_every_norm else None

    def close(self) -> None:
        """Free the memory of captured steps."""
        if self._static is not None:
            self._static.forget()


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def _probe(work: Work, feed: Feed, stack: Stack, k: int) -> list[Trace]:
    """What the round's probe measures on its clients after local step k."""
    assert work.probe is not None
    traces = []
    for row, client in enumerate(feed.clients[: stack.size].tolist()):
        if client in work.probe.clients:
            mine = stack.state.map(lambda tensor, row=row: tensor[row])  # type: ignore[misc]
            context = work.context(steps=int(feed.steps[row]), step=k)
            traces.append(Trace(client, k, work.probe.measure(mine, context)))
    return traces
