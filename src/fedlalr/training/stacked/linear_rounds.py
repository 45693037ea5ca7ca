"""The local steps of a chain of linear layers on a CPU, arranged to do as little as possible in each step.

Clients train in groups that fit into a shared cache. Meanwhile every slot is stored layer by layer: the weights of one
layer of all these clients side by side, as batched products need them, instead of all layers of one client. Labels are
prepared once for the whole round, and losses are summed at its end. The results do not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import isfinite, prod

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.training.clipping import Regularisation, clip_factor
from fedlalr.training.fused_steps import CPUStep, FusedUpdate
from fedlalr.training.interfaces import Training, Work
from fedlalr.training.layout import Layout
from fedlalr.training.stacked.feed import Feed, Shape, Tables
from fedlalr.training.stacked.linear import Labels, LinearGradient, LossSlope
from fedlalr.training.stacked.stack import Stack

CACHE = 32 << 20
"""Bytes of slots in a group of clients. Smaller groups lose more to operator overhead than they gain."""


class Layers:
    """Some slots of a group of clients, each in one block of memory, layer by layer."""

    def __init__(self, layout: Layout, names: tuple[str, ...], clients: int) -> None:
        self.layout, self.clients = layout, clients
        self.whole = Slots(
            **{name: torch.empty(clients * layout.size, dtype=layout.dtype, device="cpu") for name in names}
        )
        """Every slot as one block."""
        self.parts = {name: self._views(slot, clients) for name, slot in self.whole.items()}
        """Every layer's parameters, `[C, …]`, by slot and name."""

    def _views(self, slot: Tensor, clients: int) -> dict[str, Tensor]:
        pieces = torch.split(slot, [clients * prod(shape) for shape in self.layout.shapes])
        return {
            name: piece.view(clients, *shape)
            for name, shape, piece in zip(self.layout.names, self.layout.shapes, pieces, strict=True)
        }

    def load(self, state: Slots) -> None:
        """Copy the slots from stacks `[C, P]`."""
        for name, slot in state.items():
            for layer, value in self.layout.views(slot).items():
                self.parts[name][layer].copy_(value)

    def store(self, state: Slots) -> None:
        """Copy the slots into stacks `[C, P]`."""
        for name, slot in state.items():
            for layer, value in self.layout.views(slot).items():
                value.copy_(self.parts[name][layer])

    def first(self, clients: int) -> dict[str, dict[str, Tensor]]:
        """The parts of the first clients."""
        return {
            name: {layer: value[:clients] for layer, value in layers.items()} for name, layers in self.parts.items()
        }


class LinearRounds:
    """Runs all local steps of a round for a cohort, for the methods that have a fused step."""

    def __init__(self, training: Training, gradient: LinearGradient, update: FusedUpdate) -> None:
        self.training, self._gradient = training, gradient
        self._step = CPUStep(update, training.algorithm)
        # Clipping needs all layers of a client; a layer is decayed as a whole or not at all.
        self._decay = replace(training.regularisation, clip_norm=None, decayed=None)
        self._no_decay = replace(self._decay, decoupled_weight_decay=0.0)
        self._decayed = None if training.regularisation.decayed is None else training.decayed_names
        self.descends = update.rate is None and training.regularisation == Regularisation()
        """Whether a local step is a bare gradient step, which needs no materialised gradient."""

    def run(self, feed: Feed, tables: Tables, start: Stack, work: Work) -> Stack:
        """The stack after the round, in its own memory."""
        batches = Batches(feed, tables, self._gradient)
        total, size = start.total.clone(), self._group(start)
        held = tuple(start.state) if self.descends else (*start.state, "gradient")
        end = start.state.map(lambda slot: slot.new_empty(slot.shape))
        for first in range(0, start.size, size):
            last = min(first + size, start.size)
            layers = Layers(self.training.layout, held, last - first)
            layers.load(start.rows(first, last).state)
            self._steps(batches, layers, first, total[first:last], work)
            layers.store(end.map(lambda slot, first=first, last=last: slot[first:last]))  # type: ignore[misc]
        return Stack(end, start.buffers, total)

    def _group(self, start: Stack) -> int:
        """How many clients train together."""
        layout, held = self.training.layout, len(start.state) + (not self.descends)
        most = max(CACHE // (held * layout.size * layout.dtype.itemsize), 1)
        groups = -(-start.size // most)
        return -(-start.size // groups)

    def _steps(self, batches: Batches, layers: Layers, first: int, total: Tensor, work: Work) -> None:
        """All steps of the clients from row `first` on; their losses are added to the total."""
        parts, active = layers.parts, layers.clients
        steps = batches.of(first, first + layers.clients, total)
        for k, (clients, inputs, loss_slope) in enumerate(steps, start=1):
            if clients < active:
                parts, active = layers.first(clients), clients
            if self.descends:
                self._gradient.descend(parts["x"], inputs, loss_slope, work.lr)
            else:
                self._gradient.write(parts["x"], inputs, loss_slope, parts["gradient"])
                self._update(layers, parts, active == layers.clients, work, k)

    def _update(self, layers: Layers, parts: dict[str, dict[str, Tensor]], everyone: bool, work: Work, k: int) -> None:
        """The fused step: over everything at once, or layer by layer if some clients have finished or some layers are
        not decayed."""
        context = work.context(steps=1, step=k)  # no step here reads K
        if self.training.clip_norm is not None:
            clip(list(parts["gradient"].values()), self.training.clip_norm)
        if everyone and self._decayed is None:
            self._step(layers.whole, layers.whole.gradient, work.broadcast, context, self._decay)
            return
        for name in layers.layout.names:
            piece = Slots(**{slot: values[name] for slot, values in parts.items()})
            decay = self._decay if self._decayed is None or name in self._decayed else self._no_decay
            self._step(piece, piece.gradient, work.broadcast, context, decay)


Step = tuple[int, Tensor, LossSlope]
"""The number of clients still training, their inputs, and the function for the gradient of their losses."""


class Batches:
    """A round's batches, with prepared labels if the loss allows it."""

    def __init__(self, feed: Feed, tables: Tables, gradient: LinearGradient) -> None:
        self._feed, self._tables, self._gradient = feed, tables, gradient
        self._labels = gradient.labels(tables.pool.targets[tables.rows], tables.real)

    def of(self, first: int, last: int, total: Tensor) -> Iterator[Step]:
        """Every local step of some rows, each valid until the next; at the end their losses are added to a total."""
        pool, shapes = self._tables.pool, self._feed.shapes(first, last)
        if not shapes:
            return  # an interval may give them no step
        if isinstance(pool.inputs, Tensor) and pool.transform is None and self._labels is not None:
            yield from self._prepared(pool.inputs, self._labels, shapes, first, total)
        else:
            for k, shape in enumerate(shapes, start=1):  # augmentation, or a loss other than cross-entropy
                batch = self._tables.batch(k, shape, first)
                yield shape.active, batch.inputs, partial(self._gradient.loss_slope, batch, total[: shape.active])

    def _prepared(self, pool: Tensor, labels: Labels, shapes: list[Shape], first: int, total: Tensor) -> Iterator[Step]:
        """Samples of a pool, always in the same memory, which is still in the cache from the previous step."""
        last, width = first + shapes[0].active, self._tables.rows.shape[2]
        rows = self._tables.rows[:, first:last].unbind(0)
        noted = torch.zeros_like(labels.taken[0, first:last])
        buffer = pool.new_empty(len(noted) * width, *pool.shape[1:])
        whole = buffer.view(len(noted), width, *pool.shape[1:])
        everything = Shape(len(noted), width, padded=False)
        for shape, index, mine in zip(shapes, rows, labels.steps(first, last), strict=False):
            if shape[:2] == everything[:2]:
                torch.index_select(pool, 0, index.reshape(-1), out=buffer)
                yield shape.active, whole, partial(mine.loss_slope, noted)
            else:
                flat = index[: shape.active, : shape.width].reshape(-1)
                inputs = pool.index_select(0, flat).view(shape.active, shape.width, *pool.shape[1:])
                place = noted[: shape.active, :, : shape.width]
                yield shape.active, inputs, partial(mine.first(shape).loss_slope, place)
        total[: len(noted)] += noted.sum((1, 2)) + labels.missing[:, first:last].sum(0)


def clip(gradients: list[Tensor], most: float) -> None:
    """Clip every client's gradient, given by layers `[C, …]`, to a norm."""
    norms = [torch.linalg.vector_norm(part.flatten(1), dim=1, keepdim=True) for part in gradients]
    layers = torch.cat(norms, 1)
    if not isfinite(layers.sum().item()):  # the squares overflow: `clip_factor` needs every number
        layers = torch.cat([part.flatten(1) for part in gradients], 1)
    factor = clip_factor(layers, most)
    for part in gradients:
        part.mul_(factor.view(-1, *[1] * (part.dim() - 1)))
