"""The stacked engine: the cohort as one batched computation.

Parameters, buffers and slots of C clients are tensors `[C, …]`; the algorithm's own `step` runs on the stack unchanged.
Clients that differ in size are padded and masked, clients that differ in steps leave the stack when they are done, and
what would not fit into memory is cut into chunks. The result is the reference engine's.

Dropout draws anew for every client from torch's generator: repeatable, but not the reference engine's draws.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.training.local import local_step
from fedlalr.training.reference import ReferenceEngine
from fedlalr.training.stacked_feed import Feed
from fedlalr.training.stacked_gradient import StackedGradient, VmapGradient
from fedlalr.training.work import Buffers, Replies, Trace, Training, Work


class StackedEngine:
    """Trains the cohort as a stack."""

    name = "stacked"

    def __init__(self, training: Training) -> None:
        self.training = training
        self._reference = ReferenceEngine(training)
        self._vmap = VmapGradient(training)
        self._gradient: StackedGradient = self._vmap

    def train(self, work: Work) -> Replies:
        return join([self._train_or_name(work)])

    def _train_or_name(self, work: Work) -> Replies:
        """Train a chunk; where that raises, client by client on the reference engine, which names the one at fault."""
        try:
            return self._train_chunk(work)
        except Exception as error:
            replies = self._reference.train(work)
            if not replies.failures:
                warnings.warn(
                    f"round {work.round}: {len(work.clients)} clients were trained one by one, because the stack "
                    f"of them raised {type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return replies

    @torch.no_grad()
    def _train_chunk(self, work: Work) -> Replies:
        feed = Feed(self.training, work.round, work.clients)
        stack = self._start(work, feed)
        finished: list[Stack] = []
        traces: list[Trace] = []
        for k, shape in enumerate(feed.shapes(), start=1):
            if shape.active < stack.size:
                finished.append(stack.rows(shape.active, stack.size))
                stack = stack.rows(0, shape.active)
            losses, gradient, buffers = self._gradient(stack.state.x, stack.buffers, feed.batch(k, shape))
            steps = feed.steps[: shape.active]
            context = work.context(steps=self._steps(steps), step=k)
            state = local_step(self.training, stack.state, gradient, work.broadcast, context)
            stack = Stack(state, buffers, stack.total + losses)
            if work.probe is not None:
                traces += self._probe(work, feed, stack, k)
        return self._replies(work, feed, stack.join(finished), traces)

    def _start(self, work: Work, feed: Feed) -> Stack:
        training, count = self.training, len(feed.clients)
        order = feed.order.to(training.device)
        kept = work.kept.map(lambda tensor: tensor[order])
        state = training.algorithm.start(work.broadcast, kept).map(lambda tensor: _stacked(tensor, count))
        buffers = {name: buffer.expand(count, *buffer.shape).clone() for name, buffer in work.buffers.items()}
        total = torch.zeros(count, device=training.device, dtype=training.layout.dtype)
        return Stack(state, buffers, total)

    def _steps(self, steps: Tensor) -> int | Tensor:
        """K for the algorithm's context: one number where all clients agree, else `[C, 1]`."""
        if steps[0] == steps[-1]:
            return int(steps[0])
        return steps.to(self.training.device, self.training.layout.dtype)[:, None]

    def _probe(self, work: Work, feed: Feed, stack: Stack, k: int) -> list[Trace]:
        assert work.probe is not None
        traces = []
        for row, client in enumerate(feed.clients[: stack.size].tolist()):
            if client in work.probe.clients:
                mine = stack.state.map(lambda tensor, row=row: tensor[row])  # type: ignore[misc]
                context = work.context(steps=int(feed.steps[row]), step=k)
                traces.append(Trace(client, k, work.probe.measure(mine, context)))
        return traces

    def _replies(self, work: Work, feed: Feed, stack: Stack, traces: list[Trace]) -> Replies:
        training, count = self.training, len(feed.clients)
        steps = feed.steps.to(training.device)
        context = work.context(steps=self._steps(feed.steps), step=self._steps(feed.steps))
        upload, kept = training.algorithm.finish(stack.state, work.broadcast, context)
        replies = Replies(
            clients=feed.clients,
            samples=training.clients.sizes[feed.clients],
            steps=feed.steps,
            losses=stack.total / steps,
            slots=upload.map(lambda tensor: _stacked(tensor, count)),
            buffers=stack.buffers,
            kept=kept.map(lambda tensor: _stacked(tensor, count)),
            traces=tuple(sorted(traces)),
        )
        in_order = torch.equal(feed.order, torch.arange(count))
        return replies if in_order else replies.rows(feed.order.argsort())

    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        return self._reference.recalibrate(x, buffers, clients, round)

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class Stack:
    """Clients in the middle of a round."""

    state: Slots
    buffers: Buffers
    total: Tensor
    """Sum of the training losses so far, `[C]`."""

    @property
    def size(self) -> int:
        return len(self.total)

    def rows(self, start: int, stop: int) -> Stack:
        return Stack(
            self.state.map(lambda tensor: tensor[start:stop]),
            {name: buffer[start:stop] for name, buffer in self.buffers.items()},
            self.total[start:stop],
        )

    def join(self, finished: list[Stack]) -> Stack:
        """This stack with those that left it put back after it, the last to leave first."""
        if not finished:
            return self
        parts = [self, *reversed(finished)]
        return Stack(
            Slots(**{name: torch.cat([part.state[name] for part in parts]) for name in self.state}),
            {name: torch.cat([part.buffers[name] for part in parts]) for name in self.buffers},
            torch.cat([part.total for part in parts]),
        )


def _stacked(tensor: Tensor, count: int) -> Tensor:
    """A slot of every client, `[C, P]`, from one that all clients share or from a stack."""
    return tensor if tensor.dim() > 1 else tensor.expand(count, -1)


def join(parts: list[Replies]) -> Replies:
    """The replies of several parts of a cohort as one, in the order of the clients' ids."""
    failures = {client: reason for part in parts for client, reason in part.failures.items()}
    parts = [part for part in parts if len(part.clients)] or parts[:1]  # an empty part knows no dtypes
    clients = torch.cat([part.clients for part in parts])
    whole = Replies(
        clients=clients,
        samples=torch.cat([part.samples for part in parts]),
        steps=torch.cat([part.steps for part in parts]),
        losses=torch.cat([part.losses for part in parts]),
        slots=Slots(**{name: torch.cat([part.slots[name] for part in parts]) for name in parts[0].slots}),
        buffers={name: torch.cat([part.buffers[name] for part in parts]) for name in parts[0].buffers},
        kept=Slots(**{name: torch.cat([part.kept[name] for part in parts]) for name in parts[0].kept}),
        failures=failures,
        traces=tuple(sorted(trace for part in parts for trace in part.traces)),
    )
    return whole if bool((clients[1:] > clients[:-1]).all()) else whole.rows(clients.argsort())
