"""How far honest clients are apart: the longest change of a slot over the scale of the slot, in every round of a run.

    python benchmarks/norm_ratios.py

`max_norm_ratio` clips what is above it. Clients of equal size stay close together; clients of very different sizes,
which take very different numbers of steps, do not.
"""

from __future__ import annotations

from statistics import median_low

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fedlalr as fl
from fedlalr.algorithms import create
from fedlalr.algorithms.slots import Slots
from fedlalr.federation.replies.reductions import SHARE, change_norms
from fedlalr.federation.replies.screening import BUFFER, Measured
from fedlalr.training.interfaces import Replies

METHODS = ("fedlalr", "fedavg", "fedadam", "fedamsv2", "adaalter", "sharedamsgrad", "scaffold", "fednova", "fedlada")
PARTITIONS = (("dirichlet", {"alpha": 0.3}), ("dirichlet", {"alpha": 0.05}), ("lognormal", {"sigma": 1.5}))


class Farthest:
    """Notes the largest ratio of each slot while it is in the place of `Measured.of`."""

    def __init__(self) -> None:
        self.ratios: dict[str, float] = {}
        self._measure = Measured.of

    def __call__(self, replies: Replies, broadcast: Slots, *arguments: object) -> Measured:
        measured = self._measure(replies, broadcast, *arguments)  # type: ignore[arg-type]
        for name, norms in measured.norms.items():
            slot = broadcast.get(name, broadcast.x)
            scale = max(median_low(norms), 0.0 if name.startswith(BUFFER) else SHARE * float(change_norms(slot[None])))
            if scale > 0:
                self.ratios[name] = max(self.ratios.get(name, 0.0), max(norms) / scale)
        return measured


def measure(method: str, clients: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    farthest, original = Farthest(), Measured.of
    Measured.of = farthest  # type: ignore[method-assign,assignment]
    try:
        fl.run(model, clients, create(method), rounds=20, clients_per_round=20, local=fl.Epochs(3), batch_size=10)
    finally:
        Measured.of = original  # type: ignore[method-assign]
    return farthest.ratios


def main() -> None:
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    for scheme, options in PARTITIONS:
        parts = fl.data.partition(labels.numpy(), clients=50, scheme=scheme, seed=0, **options)
        clients = [(inputs[rows], labels[rows]) for rows in parts]
        print(f"{scheme} {options}: {min(map(len, parts))} to {max(map(len, parts))} samples a client")
        for method in METHODS:
            ratios = measure(method, clients)
            print(f"  {method}: " + ", ".join(f"{name} {ratio:.1f}" for name, ratio in ratios.items()), flush=True)


if __name__ == "__main__":
    main()
