"""The jobs that are timed. Imports only torch, so that other libraries' environments can use it without this one.

All clients have the same number of samples, so that every round is the same amount of work, whichever clients are
sampled. The data are noise: the result of training is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class BenchmarkJob:
    """Federated averaging with plain SGD on one network."""

    name: str
    title: str
    network: Callable[[], nn.Module]
    sample: tuple[int, ...]
    """Shape of an input."""
    classes: int
    vocabulary: int | None = None
    """Inputs are characters below this number; None: normal noise."""
    clients: int = 100
    samples: int = 60
    """Per client."""
    cohort: int = 20
    batch: int = 50
    epochs: int = 5
    lr: float = 0.1
    compute: str | None = None
    """The precision of this library on a GPU, if not float32 (with TF32 products, as everywhere there)."""

    @property
    def steps(self) -> int:
        """Local steps per client and round."""
        return self.epochs * -(-self.samples // self.batch)

    def model(self) -> nn.Module:
        """The network, with the same weights every time."""
        torch.manual_seed(0)
        return self.network()

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of every client."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.clients, self.samples, *self.sample)
        if self.vocabulary is None:
            inputs = torch.randn(shape, generator=generator)
        else:
            inputs = torch.randint(0, self.vocabulary, shape, generator=generator)
        targets = torch.randint(0, self.classes, shape[:2], generator=generator)
        return list(zip(inputs, targets, strict=True))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


class CharacterLSTM(nn.Module):
    """The last step of two LSTM layers over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(80, 8),
            nn.LSTM(8, 100, 2, batch_first=True),
            nn.Linear(100, 80),
        )

    def forward(self, characters: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(characters))[0][:, -1])
        return logits


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))


def dense_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def convmixer() -> nn.Module:
    from fedlalr.models import ConvMixer  # not called in other libraries' environments

    return ConvMixer()


def char_lstm() -> nn.Module:
    from fedlalr.models import CharLSTM

    return CharLSTM()


_IMAGE, _COLOURED = (1, 28, 28), (3, 32, 32)

JOBS = {
    job.name: job
    for job in (
        BenchmarkJob("cnn", "two convolutions", cnn, _IMAGE, 10),
        BenchmarkJob(
            "lstm", "two LSTM layers", CharacterLSTM, (80,), 80, 80, samples=100, cohort=10, batch=100, epochs=1
        ),
        BenchmarkJob("logistic", "logistic regression", logistic, _IMAGE, 10, batch=10),
        BenchmarkJob("perceptron", "784-64-10 perceptron", perceptron, _IMAGE, 10, batch=10),
    )
}
"""Jobs by name."""

GPU_JOBS = {
    job.name: job
    for job in (
        BenchmarkJob(
            "convmixer", "the paper's ConvMixer", convmixer, _COLOURED, 10,
            samples=500, cohort=50, epochs=1, compute="bfloat16",
        ),
        BenchmarkJob(
            "charlstm", "the paper's LSTM", char_lstm, (80,), 80, 80,
            samples=500, cohort=10, batch=100, epochs=1, compute="bfloat16",
        ),
        BenchmarkJob(
            "densecnn", "pfl's CIFAR-10 benchmark", dense_cnn, _COLOURED, 10,
            clients=1000, samples=50, cohort=50, batch=10, epochs=1,
        ),
    )
}  # fmt: skip
"""Jobs for a GPU by name: one epoch of each of the paper's networks, and the public benchmark of simulators."""
