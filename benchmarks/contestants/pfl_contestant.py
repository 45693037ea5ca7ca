"""pfl-research in a race: `python pfl_contestant.py JOB THREADS`, in an environment that has pfl.

With PFL_WORKER_ADDRESSES and PFL_WORKER_RANK set it is one of several workers, of which the first takes the turns.
pfl walks through a client's samples in their order, without a shuffle.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "fedlalr" / "benchmark"))

import numpy as np
import torch
from jobs import JOBS
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from turns import Turns


class Loss(nn.Module):
    """A network with the loss that pfl asks for."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, inputs, targets, **_):
        self.train()
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def metrics(self, inputs, targets, **_):
        return {}


class Hook(TrainingProcessCallback):
    def __init__(self, turns: Turns | None) -> None:
        self.turns = turns

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if self.turns is not None:
            self.turns.lap()
        wait_for_all()
        return False, Metrics()


def wait_for_all() -> None:
    """Hold the other workers until the first has its turn, or they would train on ahead in other contestants' time."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def main(name: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    job = JOBS[name]
    turns = Turns() if os.environ.get("PFL_WORKER_RANK", "0") == "0" else None
    np.random.seed(0)
    module = Loss(job.model())
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    users = dict(enumerate(job.data()))
    data = FederatedDataset(
        lambda user: PyTorchTensorDataset(users[user], user_id=str(user)), MinimizeReuseUserSampler(list(users))
    )
    backend = SimulatedBackend(training_data=data, val_data=data)
    if turns is not None:
        turns.ready()
    wait_for_all()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**9, evaluation_frequency=10**9, train_cohort_size=job.cohort, val_cohort_size=None
        ),
        backend,
        model,
        NNTrainHyperParams(local_num_epochs=job.epochs, local_learning_rate=job.lr, local_batch_size=job.batch),
        callbacks=[Hook(turns)],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
