"""The left side of the theorems, observed: ‖∇f(x̄)‖² at the average x̄ of the clients' iterates before every local step.

f is the unweighted mean of the clients' losses, each over all of the client's samples. Its gradient is recomputed for
every local step, so use this for small problems only. It needs the clients' iterates in this process, so it works only
on the reference engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedlalr.algorithms.slots import Context, Slots
from fedlalr.data.population import Clients, as_clients
from fedlalr.federation.observers import Observer, RunInfo
from fedlalr.federation.record import Record
from fedlalr.training.calling import batch_loss, target_of
from fedlalr.training.interfaces import Probe, Trace
from fedlalr.training.layout import Layout
from fedlalr.training.options import Loss
from fedlalr.training.torch_state import copied


class IterateSums:
    """A probe that adds up the iterates of all clients, step by step."""

    def __init__(self, clients: int) -> None:
        self.clients = frozenset(range(clients))
        self.sums: dict[int, Tensor] = {}
        self.counts: dict[int, int] = {}

    def measure(self, state: Slots, context: Context) -> dict[str, float]:
        step = int(context.step)
        self.counts[step] = self.counts.get(step, 0) + 1
        self.sums[step] = self.sums[step] + state.x if step in self.sums else state.x.clone()
        return {}

    def averages(self) -> list[Tensor]:
        """x̄ after each local step, from the first."""
        return [self.sums[step] / self.counts[step] for step in sorted(self.sums)]


class GradientNorms(Observer):
    """Records ‖∇f(x̄)‖² before every local step. Pass it the same module and clients as the run.

    `values[t][k]` belongs to round t + 1 before step k + 1; `mean` is the left side of Theorems 1 and 2.
    """

    def __init__(self, model: nn.Module, clients: Clients | Sequence[object], loss: Loss = nn.functional.cross_entropy):
        if any(True for _ in model.buffers()):
            raise ValueError(
                "the model has buffers, such as normalisation statistics, so its loss does not depend on its "
                "parameters alone; use a model without buffers"
            )
        self.model, self.loss = copied(model).eval(), loss
        self.clients = as_clients(clients, target_of(model, loss, None))
        self.layout = Layout.of(self.model)
        self.values: list[list[float]] = []
        self._start = self.layout.flatten(dict(self.model.named_parameters()))
        self._sums = IterateSums(len(self.clients))

    @property
    def mean(self) -> float:
        """The mean over all local steps of all rounds."""
        every = [value for steps in self.values for value in steps]
        return sum(every) / len(every)

    def on_start(self, info: RunInfo) -> None:
        if info.engine != "reference" or info.first_round != 1:
            raise ValueError(
                f"gradient norms need the reference engine from the first round on, "
                f"not {info.engine!r} from round {info.first_round}; start a new run with engine='reference'"
            )
        device = torch.device(info.device)
        self.model.to(device)
        self.clients, self._start = self.clients.to(device), self._start.to(device)

    def probe(self, round: int) -> Probe | None:
        self._sums = IterateSums(len(self.clients))
        return self._sums

    def on_traces(self, round: int, lr: float, traces: Sequence[Trace]) -> None:
        counts = set(self._sums.counts.values())
        if len(counts) != 1:
            raise ValueError(
                f"round {round}: the clients took different numbers of local steps, so their iterates cannot be "
                f"averaged step by step; use fl.Steps, or clients of equal size"
            )
        averages = self._sums.averages()
        self.values.append([self.squared_norm(x) for x in [self._start, *averages[:-1]]])
        self._start = averages[-1]

    def on_round(self, record: Record) -> None:
        if record.rejected:
            raise ValueError(
                f"round {record.round}: {len(record.rejected)} replies were rejected, so the server's model is not "
                f"the average of the clients' iterates"
            )
        if record.clipped:
            raise ValueError(
                f"round {record.round}: replies of clients {', '.join(map(str, record.clipped))} were clipped, so the "
                f"server's model is not the average of the clients' iterates; pass max_norm_ratio=None"
            )

    def squared_norm(self, x: Tensor) -> float:
        """‖∇f(x)‖²."""
        self.layout.load(self.model, x)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        total = torch.zeros_like(x)
        with torch.enable_grad():
            for client, size in enumerate(self.clients.sizes.tolist()):
                inputs, targets = self.clients.batch(client, torch.arange(size, device="cpu"))
                gradients = torch.autograd.grad(batch_loss(self.model, self.loss, inputs, targets), parameters)
                total += torch.cat([gradient.to_dense().reshape(-1).to(x.dtype) for gradient in gradients])
        return float((total / len(self.clients)).square().sum())
