"""Why a reply was rejected: trains its client again, alone on the reference engine, and describes its data."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TextIO

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Context, Slots
from fedlalr.common.printable import printable
from fedlalr.data.trees import named_leaves
from fedlalr.federation.replies.screening import Rejection
from fedlalr.training.engines.reference import ReferenceEngine
from fedlalr.training.interfaces import Trace, Training, Work

SHOWN_STEPS = 5
"""How many local steps a diagnosis shows at the start and around the first one that is not finite."""
SHOWN_LABELS = 20


@dataclass(frozen=True)
class Diagnosis:
    """What was found by training one client of a round alone."""

    client: int
    round: int
    reason: str
    """Why its reply was rejected."""
    data: tuple[str, ...]
    """A description of its inputs and targets."""
    steps: tuple[Trace, ...] = ()
    """The norm of every slot after every local step that it completed."""
    error: str | None = None
    """The traceback of the exception it raised."""

    @property
    def first_bad_step(self) -> int | None:
        """The first local step after which some slot is not finite."""
        return next((trace.step for trace in self.steps if not _all_finite(trace)), None)

    def __str__(self) -> str:
        lines = [f"client {self.client}, round {self.round}: {self.reason}", *(f"  {line}" for line in self.data)]
        if self.steps:
            lines.append(f"  norms of its slots after its {len(self.steps)} local steps, trained alone:")
            lines += [f"    {line}" for line in self._step_lines()]
        if self.first_bad_step is not None:
            lines.append(f"  its numbers are not finite from step {self.first_bad_step} on")
        if self.error is not None:
            lines += ["  it raised:", *(f"    {line}" for line in self.error.splitlines())]
        return "\n".join(lines)

    def _step_lines(self) -> list[str]:
        middle = self.first_bad_step or 1
        chosen = {1, len(self.steps), *range(middle - 1, middle - 1 + SHOWN_STEPS)}
        return [
            f"step {trace.step}: " + ", ".join(f"{name} {value:.3g}" for name, value in trace.values.items())
            for trace in self.steps
            if trace.step in chosen
        ]


@dataclass
class SlotNorms:
    """A probe that records the norm of every slot."""

    clients: frozenset[int]

    def measure(self, state: Slots, context: Context) -> dict[str, float]:
        return {name: float(torch.linalg.vector_norm(tensor.double())) for name, tensor in state.items()}


def diagnose(training: Training, work: Work, rejection: Rejection) -> Diagnosis:
    """Train one client of a round again, alone on the reference engine, and describe its data."""
    client = rejection.client
    alone = replace(work.part(torch.nonzero(work.clients == client)[0]), probe=SlotNorms(frozenset({client})))
    traces: list[Trace] = []
    error = None
    try:
        ReferenceEngine(training).train_client(alone, 0, client, traces)
    except Exception:  # whatever the client's data or the module raises is the diagnosis
        error = traceback.format_exc()
    return Diagnosis(client, work.round, rejection.reason, _describe_data(training, client), tuple(traces), error)


@dataclass
class Debugger:
    """Writes a diagnosis of every rejected client, once per client."""

    training: Training
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    seen: set[int] = field(default_factory=set)

    def __call__(self, work: Work, rejected: Sequence[Rejection]) -> None:
        for rejection in rejected:
            if rejection.client not in self.seen:
                self.seen.add(rejection.client)
                print(printable(str(diagnose(self.training, work, rejection))), file=self.stream, flush=True)


def describe(name: str, values: Tensor) -> str:
    """Describe a tensor: shape, dtype, range and non-finite values.

    >>> describe("inputs", torch.tensor([[0.0, 2.0], [float("nan"), 1.0]]))
    'inputs: 2 × 2 float32, from 0 to 2, mean 1; 1 NaN'
    """
    shape = " × ".join(map(str, values.shape)) or "one"
    kind = str(values.dtype).removeprefix("torch.")
    if not values.numel() or values.is_complex():
        return f"{name}: {shape} {kind}"
    finite = values[torch.isfinite(values)].double()
    spread = "nothing finite"
    if finite.numel():
        spread = f"from {float(finite.min()):.4g} to {float(finite.max()):.4g}, mean {float(finite.mean()):.4g}"
    odd = [
        f"{int(count)} {what}"
        for what, count in (("NaN", torch.isnan(values).sum()), ("infinite", torch.isinf(values).sum()))
        if count
    ]
    return f"{name}: {shape} {kind}, {spread}" + (f"; {', '.join(odd)}" if odd else "")


def _describe_data(training: Training, client: int) -> tuple[str, ...]:
    size = int(training.clients.sizes[client])
    try:
        inputs, targets = training.clients.batch(client, torch.arange(size, device="cpu"))
        parts = {
            f"{what}{name}": leaf
            for what, tree in (("inputs", inputs), ("targets", targets))
            for name, leaf in named_leaves(tree).items()
        }
        lines = [f"{size} samples", *(describe(name, leaf) for name, leaf in parts.items())]
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            labels, counts = torch.unique(targets, return_counts=True)
            each = [f"{int(label)}: {int(n)}" for label, n in zip(labels, counts, strict=True)]
            more = f", and {len(each) - SHOWN_LABELS} more" if len(each) > SHOWN_LABELS else ""
            lines.append(f"samples of each label: {', '.join(each[:SHOWN_LABELS])}{more}")
        return tuple(lines)
    except Exception as error:  # an unreadable data set may be why the client was rejected
        return (f"{size} samples, which cannot be read: {type(error).__name__}: {error}",)


def _all_finite(trace: Trace) -> bool:
    return all(math.isfinite(value) for value in trace.values.values())
