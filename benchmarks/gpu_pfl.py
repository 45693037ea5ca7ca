"""The CIFAR-10 benchmark of pfl-research on one GPU: pfl in one process and fedlalr, turn by turn.

1,000 users with 50 images each, 50 users a round, batches of 10, one epoch of SGD 0.1, two convolutions and two dense
layers. Random images of CIFAR-10's shape: the time does not depend on what they show. Both keep the images on the GPU
and use TF32.

    python benchmarks/gpu_pfl.py --turns 3

Needs pfl 0.6.0 beside fedlalr. What differs: pfl avoids users that it has just had, and goes through a user's images in
their order.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from torch import Tensor, nn

import fedlalr as fl

USERS, IMAGES, COHORT, BATCH, RATE = 1000, 50, 50, 10, 0.1


def main() -> None:
    """Print seconds a round of both, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--rounds", type=int, default=40, help="rounds of pfl in a turn; fedlalr plays ten times as many"
    )
    parser.add_argument("--users", type=int, default=USERS)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    count = options.users * IMAGES
    inputs = torch.randn(count, 3, 32, 32, device=options.device)
    targets = torch.randint(10, (count,), device=options.device)
    times: dict[str, list[float]] = {"pfl 0.6.0, one process": [], "fedlalr, FedAvg": [], "fedlalr, FedLALR": []}
    for _ in range(options.turns):
        times["pfl 0.6.0, one process"] += pfl_rounds(inputs, targets, options.rounds)
        for name, algorithm in (("fedlalr, FedAvg", fl.FedAvg(RATE)), ("fedlalr, FedLALR", fl.FedLALR(lr=1e-3))):
            times[name] += our_rounds(inputs, targets, algorithm, 10 * options.rounds)
    base = statistics.median(times["pfl 0.6.0, one process"])
    where = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    print(f"{where}, torch {torch.__version__}, {options.turns} turns")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{name:24} {1000 * middle:9.2f} ms a round, {base / middle:6.1f} x pfl ({len(seconds)} rounds)")


def our_rounds(inputs: Tensor, targets: Tensor, algorithm: fl.Algorithm, rounds: int) -> list[float]:
    """Seconds of every round after the first few."""
    users = len(targets) // IMAGES
    partition = fl.data.Partition(np.arange(len(targets)), np.arange(users + 1) * IMAGES)
    population = fl.data.Population(inputs, targets, partition, classes=10)
    clock = Clock()
    fl.run(
        fl.models.DenseCNN(),
        population,
        algorithm,
        rounds=rounds,
        clients_per_round=COHORT,
        local=fl.Epochs(1),
        batch_size=BATCH,
        device=inputs.device,
        engine="stacked",
        observers=[clock],
    )
    return clock.seconds[5:]


class Clock(fl.Observer):
    """The time between the ends of rounds, everything on the device done."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_round(self, record: fl.Record) -> None:
        self.tick()

    def tick(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def pfl_rounds(inputs: Tensor, targets: Tensor, rounds: int) -> list[float]:
    """The same job as pfl's own benchmark sets it up."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = fl.models.DenseCNN()

        def loss(self, images: Tensor, labels: Tensor) -> Tensor:
            self.train()
            return nn.functional.cross_entropy(self.network(images), labels)

        def metrics(self, images: Tensor, labels: Tensor) -> dict[str, object]:
            return {}

    class Rounds(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
            clock.tick()
            return False, Metrics()

    clock, network = Clock(), Network()
    users = list(range(len(targets) // IMAGES))
    data = FederatedDataset(
        lambda user: Dataset(
            (inputs[user * IMAGES : (user + 1) * IMAGES], targets[user * IMAGES : (user + 1) * IMAGES])
        ),
        get_user_sampler("minimize_reuse", users),
    )
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), 1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=10**9, train_cohort_size=COHORT, val_cohort_size=None
        ),
        SimulatedBackend(data, data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        callbacks=[Rounds()],
        send_metrics_to_platform=False,
    )
    return clock.seconds[5:]


if __name__ == "__main__":
    main()
