"""FedLab in a race: `python fedlab_contestant.py JOB THREADS`, in an environment that has FedLab."""

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

from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from jobs import JOBS
from torch.utils.data import DataLoader, TensorDataset
from turns import Turns


class Data:
    """Gives FedLab its loaders."""

    def __init__(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.pairs = pairs

    def get_dataloader(self, client, batch_size):
        return DataLoader(TensorDataset(*self.pairs[client]), batch_size=batch_size, shuffle=True)


def main(name: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    job, turns = JOBS[name], Turns()
    torch.manual_seed(0)
    model = job.model()
    handler = FedAvgServerHandler(model, 10**9, job.cohort / job.clients)
    trainer = FedAvgSerialClientTrainer(model, job.clients)
    trainer.setup_dataset(Data(job.data()))
    trainer.setup_optim(job.epochs, job.batch, job.lr)

    class Pipeline(StandalonePipeline):
        def evaluate(self):
            turns.lap()

    turns.ready()
    Pipeline(handler, trainer).main()


if __name__ == "__main__":
    main(*sys.argv[1:])
