"""Local steps of a stack at fixed addresses, so that a GPU can replay them as CUDA graphs.

A small network's step is hundreds of kernel launches that take longer to issue than to run. Captured once, a step is
replayed by one call: everything that changes from step to step (sample indices, learning rate, step number, parameters)
is read from fixed addresses on the device, and nothing waits for the host until the round is over.

To limit the number of graphs, the number of clients in a step is rounded up while clients are leaving the stack; the
state of those that have left is held. Python counters inside a module do not advance during a replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots
from fedlalr.data.trees import moved
from fedlalr.training.calling import outputs_of
from fedlalr.training.fused_steps import FusedStep
from fedlalr.training.interfaces import Training, Work
from fedlalr.training.local_step import local_step, other_gradients, starting_slots
from fedlalr.training.stacked.feed import Feed, Shape, Tables
from fedlalr.training.stacked.gradient import StackedGradient, gradient_at
from fedlalr.training.stacked.stack import Stack
from fedlalr.training.torch_state import forked_generators, get_buffers, host_generators, in_mode, set_buffers

MOST_GRAPHS = 24
"""At most this many step layouts are captured; further ones run eagerly."""
SIZES = 8
"""The number of sizes to which a shrinking stack is rounded up."""


class WatchedContext(Context):
    """A context that records whether the round was read: it is a Python number, which a graph would bake in."""

    round_was_read = False

    def __getattribute__(self, name: str) -> object:
        if name == "round":
            object.__setattr__(self, "round_was_read", True)
        return super().__getattribute__(name)


@dataclass(frozen=True)
class Memory:
    """The fixed memory, for as many clients, steps and samples as `tables` has."""

    stack: Stack
    broadcast: Slots
    """`[P]`, or `[C, P]` if the clients differ."""
    tables: Tables
    steps: Tensor
    """K of every client, `[C, 1]`."""
    lr: Tensor
    step: Tensor
    """k, from 1, in double precision, because it is an exponent of β."""
    place: Tensor
    """k − 1 as an index, `[1]`."""


class StaticSteps:
    """Runs the local steps of successive rounds on a stack in fixed memory."""

    def __init__(
        self, training: Training, gradient: StackedGradient, fused: FusedStep | None, *, capture: bool
    ) -> None:
        self.training, self._gradient, self._fused = training, gradient, fused
        self._others = training.algorithm.slots.gradients
        self.capture = capture
        """Whether steps are captured; turned off if the computation cannot be."""
        self.reason = ""
        """Why capturing was turned off."""
        widest = int(training.clients.sizes.max())
        self._width = min(training.step_size or widest, widest)
        self._memory: Memory | None = None
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}
        self._met: set[object] = set()

    def run(self, work: Work, feed: Feed, start: Stack) -> Stack:
        """All steps of a round from an initial stack. The result stays in the fixed memory until the next call."""
        memory = self._prepare(work, feed, start)
        for shape in feed.shapes():
            layout = rounded(shape, start.size, self._width)
            shown = vars(work.context(memory.steps[: layout.active], memory.step))
            context = WatchedContext(**shown | {"lr": memory.lr})
            self._take(memory, layout, layout.active > shape.active, context)
        return memory.stack.rows(0, start.size)

    def forget(self) -> None:
        """Free the memory and the graphs."""
        self._memory = None
        self._graphs.clear()
        self._met.clear()

    def _prepare(self, work: Work, feed: Feed, start: Stack) -> Memory:
        """Copy the start of a round into the fixed memory, which is reallocated if it is too small."""
        tables = feed.tables(self._width)
        assert tables is not None
        steps, clients = tables.rows.shape[:2]
        memory = self._memory
        if memory is None or steps > memory.tables.rows.shape[0] or clients > memory.stack.size:
            self.forget()
            memory = self._memory = self._allocate(work, start, tables)
        for place, value in zip(memory.tables[1:], tables[1:], strict=True):
            if place is not None and value is not None:
                place[:steps, :clients].copy_(value)
        mine = memory.stack.rows(0, clients)
        for name, slot in mine.state.items():
            slot.copy_(start.state[name])
        for name, buffer in mine.buffers.items():
            buffer.copy_(start.buffers[name])
        for name, slot in memory.broadcast.items():
            (slot[:clients] if work.per_client else slot).copy_(work.broadcast[name])
        memory.steps[:clients, 0].copy_(feed.steps_there)
        memory.lr.fill_(work.lr)
        for counter in (mine.total, memory.step):
            counter.zero_()
        memory.place.fill_(-1)
        return memory

    def _allocate(self, work: Work, start: Stack, tables: Tables) -> Memory:
        device, dtype = self.training.device, self.training.layout.dtype
        longest = 1 << (tables.rows.shape[0] - 1).bit_length()  # room for rounds with a few more steps
        return Memory(
            stack=Stack(
                start.state.map(lambda slot: torch.empty_like(slot, memory_format=torch.contiguous_format)),
                {name: torch.empty_like(buffer) for name, buffer in start.buffers.items()},
                torch.empty_like(start.total),
            ),
            broadcast=work.broadcast.map(partial(torch.empty_like, memory_format=torch.contiguous_format)),
            tables=tables.map(lambda table: table.new_zeros(longest, *table.shape[1:])),
            steps=torch.empty(start.size, 1, device=device, dtype=dtype),
            lr=torch.empty((), device=device, dtype=dtype),
            step=torch.empty((), device=device, dtype=torch.float64),
            place=torch.empty(1, device=device, dtype=torch.int64),
        )

    def _take(self, memory: Memory, shape: Shape, held: bool, context: WatchedContext) -> None:
        """One step: eager the first time its layout occurs, captured the second time, replayed from then on."""
        key = (shape, held, context.cohort, context.population)
        if key in self._graphs:
            self._graphs[key].replay()
        elif self.capture and key in self._met and len(self._graphs) < MOST_GRAPHS:
            self._capture(key, lambda: self._step(memory, shape, held, context))
        else:
            before = host_generators() if self.capture else None
            self._step(memory, shape, held, context)
            self._met.add(key)
            if self.capture and context.round_was_read:
                self._stop(f"{type(self.training.algorithm).__name__}.step reads the round, which a graph would freeze")
            elif self.capture and host_generators() != before:
                self._stop("the model or the loss draws from NumPy's or Python's generator, which a graph would freeze")

    def _capture(self, key: object, step: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        generator = torch.cuda.default_generators[self.training.device.index or 0]
        before = generator.clone_state()
        try:
            with torch.cuda.graph(graph, pool=pool):
                step()
        except Exception as error:  # the model, the loss or the algorithm synchronises with the host
            self._stop(f"a step cannot be captured as a CUDA graph ({type(error).__name__}: {error})")
            torch.cuda.synchronize(self.training.device)
            generator.graphsafe_set_state(before)  # its own still expects the capture to end and would draw nothing
            step()
            return
        self._graphs[key] = graph
        graph.replay()

    def _stop(self, reason: str) -> None:
        self.capture, self.reason = False, reason
        warnings.warn(f"local steps run without CUDA graphs, which is slower: {reason}", RuntimeWarning, stacklevel=2)

    def _step(self, memory: Memory, shape: Shape, held: bool, context: Context) -> None:
        """One local step of the first clients of the stack; those that have left (if `held`) keep their state."""
        memory.step.add_(1)
        memory.place.add_(1)
        now = memory.stack.rows(0, shape.active)
        active = memory.steps[: shape.active, 0] >= memory.step if held else None
        before = {name: buffer.clone() for name, buffer in now.buffers.items()} if held else now.buffers
        batch = memory.tables.map(lambda table: table.index_select(0, memory.place)).batch(1, shape)
        others = gradient_at(self._gradient, now.buffers, batch)
        for name, gradient in other_gradients(self.training, self._others, now.state, others).items():
            now.state[name].copy_(gradient)
        losses, gradient, after = self._gradient(now.state.x, now.buffers, batch)
        self._update(memory, now.state, gradient, context, active)
        for name, buffer in now.buffers.items():
            _write(buffer, after[name], before[name], active)
        now.total.add_(losses if active is None else torch.where(active, losses, 0.0))

    def _update(self, memory: Memory, state: Slots, gradient: Tensor, context: Context, active: Tensor | None) -> None:
        if self._fused is not None:
            self._fused(state, gradient, memory.broadcast, context, self.training.regularisation, active)
            return
        broadcast = memory.broadcast.map(lambda slot: slot[: len(gradient)] if slot.dim() > 1 else slot)
        new = apart(local_step(self.training, state, gradient, broadcast, context), state)
        for name, slot in state.items():
            _write(slot, new[name], slot, active)


def rounded(shape: Shape, clients: int, width: int) -> Shape:
    """A shape with the number of clients rounded up to one of a few sizes, at full width if it is padded at all.

    >>> rounded(Shape(active=33, width=20, padded=False), clients=50, width=50)
    Shape(active=36, width=50, padded=True)
    """
    grain = max(clients // SIZES, 1)
    active = min(-(-shape.active // grain) * grain, clients)
    padded = shape.padded or active > shape.active
    return Shape(active, width if padded else shape.width, padded)


def draws(training: Training) -> bool:
    """Whether a training forward pass draws random numbers, as dropout does; True if it cannot be run."""
    model, buffers = training.model, get_buffers(training.model)
    batch = training.clients.batch(0, torch.arange(min(2, int(training.clients.sizes[0])), device="cpu"))
    device = training.device
    state = partial(torch.cuda.get_rng_state, device) if device.type == "cuda" else torch.get_rng_state
    with forked_generators(device), torch.no_grad(), in_mode(model, training=True):
        before, host = state(), host_generators()
        try:
            outputs_of(model, training.loss, *(moved(part, device) for part in batch))
        except Exception:  # a round will show the error; steps without graphs are always right
            return True
        finally:
            set_buffers(model, buffers)
        return not torch.equal(before, state()) or host_generators() != host


def apart(new: Slots, state: Slots) -> Slots:
    """A step's result that does not change while the slots it was computed from are overwritten one by one.

    A step may return a slot under another name, as in `x_before = x`. Such values are copied.
    """
    fixed = {slot.untyped_storage().data_ptr() for slot in state.values()}
    return Slots(
        **{
            name: value.clone()
            if value.untyped_storage().data_ptr() in fixed and value.data_ptr() != state[name].data_ptr()
            else value
            for name, value in new.items()
        }
    )


def _write(target: Tensor, new: Tensor, old: Tensor, active: Tensor | None) -> None:
    """Write new values in place, or keep the old ones of clients that are not active."""
    if active is not None:
        new = torch.where(active.view(-1, *[1] * (old.dim() - 1)), new, old)
    if new.data_ptr() != target.data_ptr():
        target.copy_(new)


def keeps_its_slots(training: Training, params: Tensor) -> bool:
    """Whether an algorithm's step returns the same slots as its start, so that they can be written in place."""
    algorithm = training.algorithm
    server = algorithm.init(params)
    state, broadcast = starting_slots(algorithm, server), server.only(*algorithm.slots.down)
    context = Context(round=1, lr=algorithm.lr, steps=1, step=1, shapes=training.shapes)
    new = algorithm.step(state, torch.zeros_like(params), broadcast, context)
    return set(state) == set(new)
