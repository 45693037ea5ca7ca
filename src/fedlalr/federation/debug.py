"""Why a reply was rejected: trains its client again, alone on the reference engine, and describes its data."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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


@dataclass
class SlotNorms:
    """A probe that records the norm of every slot."""

    clients: frozenset[int]

    def measure(self, state: Slots, context: Context) -> dict[str, float]:
        return {name: float(torch.linalg.vector_norm(tensor.double())) for name, tensor in state.items()}


def diagnosis(training: Training, work: Work, rejection: Rejection) -> str:
    """Train one client of a round again, alone on the reference engine, and describe what happens, and its data."""
    client, reason = rejection
    lines = [f"client {client}, round {work.round}: {reason}", *(f"  {line}" for line in _data(training, client))]
    alone = replace(work.part(torch.nonzero(work.clients == client)[0]), probe=SlotNorms(frozenset({client})))
    traces: list[Trace] = []
    error = ""
    try:
        ReferenceEngine(training).train_client(alone, 0, client, traces)
    except Exception:  # whatever the client's data or the module raises is the diagnosis
        error = traceback.format_exc()
    bad = next((each.step for each in traces if not all(map(math.isfinite, each.values.values()))), None)
    if traces:
        shown = {1, len(traces), *range((bad or 1) - 1, (bad or 1) - 1 + SHOWN_STEPS)}
        lines.append(f"  norms of its slots after its {len(traces)} local steps, trained alone:")
        for each in (each for each in traces if each.step in shown):
            norms = ", ".join(f"{name} {value:.3g}" for name, value in each.values.items())
            lines.append(f"    step {each.step}: {norms}")
    if bad is not None:
        lines.append(f"  its numbers are not finite from step {bad} on")
    if error:
        lines += ["  it raised:", *(f"    {line}" for line in error.splitlines())]
    return "\n".join(lines)


@dataclass
class Debugger:
    """Writes a diagnosis of every rejected client, once per client."""

    training: Training
    seen: set[int] = field(default_factory=set)

    def __call__(self, work: Work, rejected: Sequence[Rejection]) -> None:
        for rejection in rejected:
            if rejection.client not in self.seen:
                self.seen.add(rejection.client)
                print(printable(diagnosis(self.training, work, rejection)), file=sys.stderr, flush=True)


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
    counts = {"NaN": int(values.isnan().sum()), "infinite": int(values.isinf().sum())}
    odd = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{name}: {shape} {kind}, {spread}" + (f"; {odd}" if odd else "")


def _data(training: Training, client: int) -> list[str]:
    size = int(training.clients.sizes[client])
    try:
        inputs, targets = training.clients.batch(client, torch.arange(size, device="cpu"))
        lines = [f"{size} samples"]
        for what, tree in (("inputs", inputs), ("targets", targets)):
            lines += [describe(what + name, leaf) for name, leaf in named_leaves(tree).items()]
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            labels, counts = torch.unique(targets, return_counts=True)
            each = [f"{int(label)}: {int(n)}" for label, n in zip(labels, counts, strict=True)]
            more = f", and {len(each) - SHOWN_LABELS} more" if len(each) > SHOWN_LABELS else ""
            lines.append(f"samples of each label: {', '.join(each[:SHOWN_LABELS])}{more}")
        return lines
    except Exception as error:  # an unreadable data set may be why the client was rejected
        return [f"{size} samples, which cannot be read: {type(error).__name__}: {error}"]
