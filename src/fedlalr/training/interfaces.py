"""The interface of engines: the work they are given and the replies they return."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from fedlalr.algorithms.slots import Algorithm, Context, Slots
from fedlalr.data.batches import batches_per_pass
from fedlalr.data.population import Clients
from fedlalr.training.clipping import Regularisation
from fedlalr.training.intervals import checked
from fedlalr.training.layout import Division, Layout
from fedlalr.training.options import LocalOptions
from fedlalr.training.parameter_groups import matching, trainable_parameters
from fedlalr.training.ranks import WHOLE, Spread

Buffers = dict[str, Tensor]
Tensors = Mapping[str, Tensor]


def joined(parts: Sequence[Tensors]) -> Buffers:
    """The rows of several stacks of named tensors as one."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def named(values: Tensors, prefix: str) -> dict[str, Tensor]:
    """The values of one kind, without its prefix."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Training(LocalOptions):
    """What stays constant during a run: the problem, and how every client trains on it."""

    model: nn.Module
    """A private copy on the run's device; engines may write into it."""
    layout: Layout
    clients: Clients
    algorithm: Algorithm
    device: torch.device = torch.device("cpu")
    compute: torch.dtype | None = None
    """bfloat16 or float16: run the model under autocast; parameters and moments keep the layout's dtype."""
    most_steps: Tensor | None = None
    """The local steps that each client finishes before the deadline of a round, int64 `[N]`; None: no deadline."""

    @cached_property
    def regularisation(self) -> Regularisation:
        """Clipping and weight decay as one value."""
        decayed = self.decayed_names
        mask = None if len(decayed) == len(self.layout.names) else self.layout.mask(decayed, self.device)
        return Regularisation(self.clip_norm, self.weight_decay, self.decoupled_weight_decay, mask)

    @property
    def decayed_names(self) -> Collection[str]:
        """The parameters with decoupled weight decay; by default matrices, but neither biases nor norms."""
        if not self.decoupled_weight_decay:
            return self.layout.names
        if self.decayed is None:
            return [name for name, shape in zip(self.layout.names, self.layout.shapes, strict=True) if len(shape) > 1]
        return matching("decayed", self.decayed, trainable_parameters(self.model))

    @property
    def step_size(self) -> int | None:
        """Samples in a local step; None: all of a client's."""
        return None if self.batch_size is None else self.batch_size * self.accumulate

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The parameters' shapes for the algorithm's context, if its slot table requests them."""
        return self.layout.shapes if self.algorithm.slots.shapes else ()

    @cached_property
    def division(self) -> Division:
        """Which coordinates are shared and which are personal."""
        personal = matching("personal", self.personal or (), trainable_parameters(self.model))
        return Division.of(self.layout, personal)

    @property
    def is_personal(self) -> bool:
        """Whether clients have models of their own, so that the server's is incomplete."""
        return bool(self.personal) or (self.buffers == "local" and any(True for _ in self.model.buffers()))

    def steps(self, round: int, clients: Tensor) -> Tensor:
        """K of each client in a round, int64 `[C]`."""
        sizes = self.clients.sizes[clients]
        per_pass = batches_per_pass(sizes, self.step_size, self.drop_last)
        steps = checked(self.local, self.local.steps(round, per_pass), len(clients))
        return steps if self.most_steps is None else steps.minimum(self.most_steps[clients]).clamp(min=1)


class Probe(Protocol):
    """Measures chosen clients after each of their local steps. Must be picklable: it runs where the client trains."""

    clients: frozenset[int]

    def measure(self, state: Slots, context: Context) -> dict[str, float]:
        """Numbers to record for one client's state `[P]`."""


class Trace(NamedTuple):
    """A probe's measurements of one client after one local step."""

    client: int
    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Work:
    """One round for one cohort."""

    round: int
    lr: float
    clients: Tensor
    """Ids, int64 `[C]`, ascending, on the CPU."""
    broadcast: Slots
    """`[P]`, or `[C, P]` if the clients differ; see `per_client`."""
    buffers: Buffers
    kept: Slots
    """The clients' kept slots, stacked in the order of `clients`: `[C, P]`, or `[C, 1]` if they are one number."""
    cohort: int
    """Number of clients in the whole round; an engine may be given only a part."""
    population: int
    probe: Probe | None = None
    shapes: tuple[torch.Size, ...] = ()
    """The parameters' shapes, if the slot table requests them: `Training.shapes`."""
    per_client: bool = False
    """Whether broadcast and buffers differ between the clients, and are stacked like the kept slots."""

    def context(self, steps: float | Tensor, step: int | Tensor = 0) -> Context:
        """The context of a local step, as the algorithm sees it."""
        return Context(self.round, self.lr, steps, step, self.cohort, self.population, self.shapes)

    def part(self, rows: Tensor) -> Work:
        """The same round for some of its clients."""
        broadcast, buffers = self.of(rows)
        kept = self.kept.map(lambda tensor: tensor[rows])
        return replace(self, clients=self.clients[rows], broadcast=broadcast, buffers=buffers, kept=kept)

    def of(self, rows: Tensor | slice | int) -> tuple[Slots, Buffers]:
        """The broadcast and the buffers of some clients: what all share, or their rows."""
        if not self.per_client:
            return self.broadcast, self.buffers
        buffers = {name: buffer[rows] for name, buffer in self.buffers.items()}
        return self.broadcast.map(lambda slot: slot[rows]), buffers


@dataclass(frozen=True)
class Replies:
    """What the cohort sends back, stacked over the clients that succeeded, in ascending order of their ids."""

    clients: Tensor
    """Ids, int64 `[R]`, on the CPU."""
    samples: Tensor
    """Training samples of each client, int64 `[R]`, on the CPU."""
    steps: Tensor
    """Local steps of each client, int64 `[R]`, on the CPU."""
    losses: Tensor
    """Mean training loss over each client's local steps, `[R]`."""
    slots: Slots
    """The uploads, `[R, P]`."""
    buffers: Buffers
    """The modules' buffers, `[R, …]`."""
    kept: Slots
    """What each client will keep if its reply is accepted, stacked like `Work.kept`."""
    failures: Mapping[int, str] = field(default_factory=dict)
    """Client → error, for clients that raised."""
    traces: tuple[Trace, ...] = ()
    spread: Spread = WHOLE
    """If several processes share the cohort: which rows of `slots`, `buffers` and `kept` this one holds."""

    @staticmethod
    def memory(work: Work, training: Training, device: torch.device | None = None) -> dict[str, Tensor]:
        """Memory for the replies of a round, with a row for each client, for `write_reply`."""
        table, layout, rows = training.algorithm.slots, training.layout, len(work.clients)
        like = torch.empty(0, dtype=layout.dtype, device=device or training.device)
        memory = {f"up:{name}": like.new_empty(rows, layout.size) for name in table.up}
        kept = table.nothing_kept(like.new_empty(layout.size))
        memory |= {f"out_kept:{name}": value.new_empty(rows, *value.shape) for name, value in kept.items()}
        for name, buffer in work.buffers.items():
            memory[f"out_buffer:{name}"] = buffer.new_empty(rows, *buffer.shape[work.per_client :], device=like.device)
        return memory | {"loss": like.new_empty(rows)}

    @classmethod
    def of(
        cls, held: Tensors, work: Work, training: Training, errors: Mapping[int, str] = {}, traces: Sequence[Trace] = ()
    ) -> Replies:
        """The replies that a `memory` holds; `errors` are those of the clients that raised, by row."""
        whole = cls(
            clients=work.clients,
            samples=training.clients.sizes[work.clients],
            steps=training.steps(work.round, work.clients),
            losses=held["loss"].clone(),
            slots=Slots(**named(held, "up:")),
            buffers={name: buffer.clone() for name, buffer in named(held, "out_buffer:").items()},
            kept=Slots(**named(held, "out_kept:")),
            failures={int(work.clients[row]): error for row, error in sorted(errors.items())},
            traces=tuple(sorted(traces, key=lambda trace: trace[:2])),
        )
        good = [row for row in range(len(work.clients)) if row not in errors]
        return whole.rows(torch.tensor(good, dtype=torch.int64, device="cpu")) if errors else whole

    @classmethod
    def empty(cls, work: Work, training: Training) -> Replies:
        """The replies of a round without clients."""
        return cls.of(cls.memory(work, training), work, training)

    @classmethod
    def cat(cls, parts: Sequence[Replies]) -> Replies:
        """The replies of several parts of a cohort as one, ordered by client id."""
        if len(parts) == 1:
            return parts[0]
        failures = {client: reason for part in parts for client, reason in part.failures.items()}
        traces = [trace for part in parts for trace in part.traces]
        parts = [part for part in parts if len(part.clients)] or parts[:1]  # an empty part has no dtypes
        clients = torch.cat([part.clients for part in parts])
        whole = cls(
            clients=clients,
            samples=torch.cat([part.samples for part in parts]),
            steps=torch.cat([part.steps for part in parts]),
            losses=torch.cat([part.losses for part in parts]),
            slots=Slots(**joined([part.slots for part in parts])),
            buffers=joined([part.buffers for part in parts]),
            kept=Slots(**joined([part.kept for part in parts])),
            failures=failures,
            traces=tuple(sorted(traces, key=lambda trace: trace[:2])),
        )
        return whole if bool((clients[1:] > clients[:-1]).all()) else whole.rows(clients.argsort())

    def rows(self, index: Tensor) -> Replies:
        """Some rows of the replies; in ascending order if they are spread over processes."""
        here, spread = self.spread.rows(index)
        return replace(
            self,
            clients=self.clients[index],
            samples=self.samples[index],
            steps=self.steps[index],
            losses=self.losses[index.to(self.losses.device)],
            slots=self.slots.map(lambda tensor: tensor[here.to(tensor.device)]),
            buffers={name: tensor[here.to(tensor.device)] for name, tensor in self.buffers.items()},
            kept=self.kept.map(lambda tensor: tensor[here.to(tensor.device)]),
            spread=spread,
        )


def reason_of(error: Exception) -> str:
    """Why a client has no reply, as records and messages say it."""
    hint = ""
    if "more than 1 value per channel" in str(error):  # of BatchNorm, for a last batch of one sample
        hint = "; drop_last=True leaves out a last batch that is not full; leave out a client with a single sample"
    return f"{type(error).__name__}: {error}{hint}"


def write_reply(
    memory: Tensors, row: int, upload: Tensors, buffers: Tensors, kept: Tensors, loss: float | Tensor
) -> None:
    """Write one client's reply into `Replies.memory`."""
    memory["loss"][row] = loss
    for kind, values in (("up:", upload), ("out_buffer:", buffers), ("out_kept:", kept)):
        for name, value in values.items():
            memory[kind + name][row] = value


class Engine(Protocol):
    """Trains a cohort. Every engine gives the same result as the reference engine."""

    @property
    def name(self) -> str: ...

    def train(self, work: Work) -> Replies:
        """One round of local training. The replies may use the engine's memory until its next round."""

    def recalibrate(self, x: Tensor, buffers: Buffers, clients: Tensor, round: int) -> Buffers:
        """Normalisation statistics of a model `x` on each client's own data, stacked `[C, …]`."""

    def close(self) -> None:
        """Release processes and memory."""


def real_numbers(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real numbers; real tensors as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
