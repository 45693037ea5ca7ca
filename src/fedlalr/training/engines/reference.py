"""The reference engine: one client after another, with plain autograd. It defines the correct result.

Every other engine is tested against it. It runs any module, loss and data set on any device. On a CPU, steps that have
a fused form use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.data.batches import PADDING, plan
from fedlalr.data.random import MODULES, key
from fedlalr.data.trees import Tree, length, map_tree, rows
from fedlalr.training.accumulation import terms_of, weighted_mean
from fedlalr.training.calling import batch_loss, outputs_of
from fedlalr.training.fused_steps import fused_step
from fedlalr.training.interfaces import Buffers, Replies, Trace, Training, Work, reason_of, write_reply
from fedlalr.training.local_step import check_unwritten, finish, local_step, other_gradients, without_drawing
from fedlalr.training.torch_internals import BatchNorm, write_counts
from fedlalr.training.torch_state import get_buffers, seed_generators, set_buffers


class ReferenceEngine:
    """Trains the cohort client by client."""

    name = "reference"

    def __init__(self, training: Training) -> None:
        self.training = training
        self.parameters = [p for p in training.model.parameters() if p.requires_grad]
        self._others = training.algorithm.slots.gradients
        on_cpu = training.device.type == "cpu"
        self._fused = fused_step(training.algorithm, "cpu", training.layout.dtype) if on_cpu else None

    def train(self, work: Work) -> Replies:
        memory, errors, traces = Replies.memory(work, self.training), dict[int, str](), list[Trace]()
        for row, client in enumerate(work.clients.tolist()):
            try:
                write_reply(memory, row, *self.train_client(work, row, client, traces))
            except Exception as error:  # whatever a client's data or module raises fails only that client
                errors[row] = reason_of(error)
        return Replies.of(memory, work, self.training, errors, traces)

    def train_client(
        self, work: Work, row: int, client: int, traces: list[Trace], stop: Callable[[], bool] = lambda: False
    ) -> tuple[Slots, Buffers, Slots, Tensor]:
        """One client's round: its upload, buffers, kept slots and mean training loss. `stop` is called after every
        local step, and ends the round early."""
        training, (broadcast, buffers) = self.training, work.of(row)
        before = write_counts(broadcast)
        model, algorithm = training.model, training.algorithm
        set_buffers(model, buffers)
        if not model.training:
            model.train()
        batches = self._batches(work, client)
        seed_generators(training.device, key(training.seed, MODULES, work.round, client))  # for dropout
        state = algorithm.start(broadcast, work.kept.map(lambda tensor: tensor[row]))
        if self._fused is not None:
            state = state.map(Tensor.clone)  # it is written in place
        total = torch.zeros((), device=training.device, dtype=training.layout.dtype)
        k = 0  # an interval may give a client no step
        for k, positions in enumerate(batches, start=1):
            inputs, targets = training.clients.training_batch(client, positions, training.seed, work.round, k)
            if self._others:
                state = self._with_others(state, inputs, targets)
            self._load(state.x)
            loss, gradient = self._gradient(inputs, targets)
            context = work.context(steps=len(batches), step=k)
            with torch.no_grad():
                if self._fused is None:
                    state = local_step(training, state, gradient, broadcast, context)
                else:
                    self._fused(state, gradient, broadcast, context, training.regularisation)
                total += loss
                if work.probe is not None and client in work.probe.clients:
                    traces.append(Trace(client, k, work.probe.measure(state, context)))
            if stop():
                break
        with torch.no_grad():
            upload, kept = finish(training, state, broadcast, work.context(steps=k, step=k))
        check_unwritten(algorithm, broadcast, before)
        return upload, get_buffers(model), kept, total / k

    def _batches(self, work: Work, client: int) -> list[Tensor]:
        training, ids = self.training, torch.tensor([client], device="cpu")
        steps = training.steps(work.round, ids)
        sizes = training.clients.sizes[ids]
        batches = plan(training.seed, work.round, ids, sizes, steps, training.step_size, training.drop_last)[0]
        return [batch[batch != PADDING] for batch in batches]

    @torch.no_grad()
    def _load(self, x: Tensor) -> None:
        """`Layout.load` without traversing the modules in every local step."""
        parts = torch.split(x, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.copy_(part.view(parameter.shape))

    def _with_others(self, state: Slots, inputs: Tree, targets: Tree) -> Slots:
        """The client's slots with the additional gradients of its batch, which do not change the module's buffers."""
        training, buffers = self.training, get_buffers(self.training.model)

        def gradient_at(x: Tensor) -> Tensor:
            self._load(x)
            gradient = self._gradient(inputs, targets)[1]
            set_buffers(training.model, buffers)
            return gradient

        at = without_drawing(gradient_at, training.device)
        return state.replace(**other_gradients(training, self._others, state, at))

    def _gradient(self, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        """Loss and gradient of a local step's batch, by micro-batches if it has several."""
        size, count = self.training.batch_size, length(targets)
        if size is None or count <= size:
            return self.gradient_at_once(inputs, targets)
        parts = [rows((inputs, targets), slice(first, first + size)) for first in range(0, count, size)]
        terms = partial(terms_of, self.training.loss)
        return weighted_mean(
            (*self.gradient_at_once(some, labels), terms(map_tree(lambda leaf: leaf[None], labels))[0])
            for some, labels in parts
        )

    def gradient_at_once(self, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        """Loss and gradient of a batch by plain autograd, at the module's parameters."""
        training = self.training
        if training.compute is None:
            loss = batch_loss(training.model, training.loss, inputs, targets)
        else:
            with torch.autocast(training.device.type, training.compute):
                loss = batch_loss(training.model, training.loss, inputs, targets)
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        return loss.detach().reshape(()), torch.cat(
            [
                (torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g)
                .reshape(-1)
                .to(training.layout.dtype)
                for p, g in zip(self.parameters, gradients, strict=True)
            ]
        )

    @torch.no_grad()
    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        self.training.layout.load(self.training.model, x)
        each = [self.statistics(buffers, client, round) for client in clients.tolist()]
        return {name: torch.stack([one[name] for one in each]) for name in buffers}

    @torch.no_grad()
    def statistics(self, buffers: Buffers, client: int, round: int) -> Buffers:
        """The buffers after one pass over a client's data in which every normalisation layer averages over the batches,
        except layers that the caller has put in evaluation mode."""
        training, model = self.training, self.training.model
        set_buffers(model, buffers)
        if not model.training:
            model.train()
        seed_generators(training.device, key(training.seed, MODULES, round, client))
        layers = [layer for layer in model.modules() if isinstance(layer, BatchNorm) and layer.training]
        momenta = [layer.momentum for layer in layers]
        try:
            for layer in layers:
                layer.momentum = None  # a cumulative average instead of an exponential one
                layer.reset_running_stats()
            batch_size = training.batch_size or 1000
            every = torch.arange(int(without_a_single(training.clients.sizes[client], batch_size)), device="cpu")
            for positions in torch.split(every, batch_size):
                outputs_of(model, training.loss, *training.clients.batch(client, positions))
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
        return get_buffers(model)

    def close(self) -> None:
        """Nothing to release."""


def without_a_single(sizes: Tensor, batch_size: int) -> Tensor:
    """Samples of clients for statistics: a last batch of one sample is left out, since it has no variance."""
    alone = (sizes > 1) & (sizes % batch_size == 1)
    return sizes - alone.to(sizes.dtype)
