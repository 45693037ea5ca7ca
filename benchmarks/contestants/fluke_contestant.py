"""fluke in a race: `python fluke_contestant.py JOB THREADS`, in an environment that has fluke."""

# ruff: noqa: E402 - what torchvision asks for must be there before it is imported
from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src" / "fedlalr" / "benchmark"))

import torch

# The public torchvision wheel is built for CUDA. Beside a CPU build of torch its operators do not load, and its import
# asks for two of them; nothing here calls them.
_operators = torch.library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    _operators.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.utils import ServerObserver
from jobs import JOBS
from turns import Turns


class Given:
    """Deals the job's clients instead of splitting a data set."""

    def __init__(self, loaders: list[FastDataLoader]) -> None:
        self.loaders = loaders

    def assign(self, n_clients, batch_size):
        return (self.loaders, [None] * n_clients), None


def main(name: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    job, turns = JOBS[name], Turns()
    environment = FlukeENV()
    environment.set_seed(0)
    environment.set_device("cpu")
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        FastDataLoader(inputs, targets, num_labels=job.classes, batch_size=job.batch, shuffle=True)
        for inputs, targets in job.data()
    ]
    settings = DDict(
        client=DDict(
            batch_size=job.batch,
            local_epochs=job.epochs,
            loss=torch.nn.CrossEntropyLoss,
            optimizer=DDict(name="SGD", lr=job.lr),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
        ),
        server=DDict(weighted=False),
        model=job.model(),
    )
    federation = FedAVG(job.clients, Given(loaders), settings)

    class Hook(ServerObserver):
        def end_round(self, round):
            turns.lap()

    federation.attach(Hook())
    turns.ready()
    federation.run(n_rounds=10**9, eligible_perc=job.cohort / job.clients)


if __name__ == "__main__":
    main(*sys.argv[1:])
