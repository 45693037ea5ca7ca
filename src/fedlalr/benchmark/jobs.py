"""The jobs that are timed. Imports only torch, so that other libraries' environments can use it without this one.

All clients have the same number of samples, so that every round is the same amount of work, whichever clients are
sampled. The data are noise: the result of training is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
    autocast: bool = False
    """Whether the plain loop uses `compute` too. It does where that makes it faster."""
    sequence: bool = False
    """Whether there is a target for each position of an input, not one for each input."""

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
        targets = torch.randint(0, self.classes, shape if self.sequence else shape[:2], generator=generator)
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


class LoRA(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices (Hu et al., "LoRA", ICLR 2022)."""

    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.frozen(x) + self.up(self.down(x))
        return output


def gpt(vocabulary: int, length: int, dim: int, layers: int, heads: int, *, lora: bool = False) -> nn.Module:
    """GPT; with `lora`, frozen and with adapters on both linear layers of each attention."""
    from fedlalr.models import GPT

    model = GPT(vocabulary, length, dim, layers, heads)
    if lora:
        model.requires_grad_(False)
        for name, layer in list(model.named_modules()):
            if name.endswith((".attention.inputs", ".attention.outputs")) and isinstance(layer, nn.Linear):
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, LoRA(layer))
    return model


def gpt_job(
    name: str, title: str, vocabulary: int, length: int, dim: int, layers: int, heads: int,
    *, lora: bool = False, cohort: int, batch: int, steps: int, compute: str | None = None,
) -> BenchmarkJob:  # fmt: skip
    """A GPT on random tokens; a round is `steps` batches of each of `cohort` clients."""
    network = partial(gpt, vocabulary, length, dim, layers, heads, lora=lora)
    return BenchmarkJob(
        name, title, network, (length,), vocabulary, vocabulary, clients=cohort, samples=steps * batch, cohort=cohort,
        batch=batch, epochs=1, compute=compute, autocast=True, sequence=True,
    )  # fmt: skip


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
        gpt_job("gpt", "GPT, 0.8 million parameters", 80, 64, 128, 4, 4, cohort=10, batch=8, steps=5),
        gpt_job("lora", "adapters on a frozen GPT", 80, 64, 128, 4, 4, lora=True, cohort=10, batch=8, steps=5),
    )
}
"""Jobs by name."""

GPU_JOBS = {
    job.name: job
    for job in (
        BenchmarkJob(
            "convmixer", "ConvMixer, 0.6 million parameters", convmixer, _COLOURED, 10,
            samples=500, cohort=50, epochs=1, compute="bfloat16",
        ),
        BenchmarkJob(
            "charlstm", "LSTM, 0.13 million parameters", char_lstm, (80,), 80, 80,
            samples=500, cohort=10, batch=100, epochs=1, compute="bfloat16",
        ),
        BenchmarkJob(
            "densecnn", "pfl's CIFAR-10 benchmark", dense_cnn, _COLOURED, 10,
            clients=1000, samples=50, cohort=50, batch=10, epochs=1,
        ),
        gpt_job(
            "gpt-small", "GPT, 10.8 million parameters", 80, 256, 384, 6, 6,
            cohort=8, batch=16, steps=10, compute="bfloat16",
        ),
        gpt_job(
            "gpt-medium", "GPT, 85.5 million parameters", 80, 512, 768, 12, 12,
            cohort=4, batch=8, steps=5, compute="bfloat16",
        ),
        gpt_job(
            "gpt2-lora", "adapters on a frozen GPT-2", 50257, 256, 768, 12, 12,
            lora=True, cohort=10, batch=8, steps=5, compute="bfloat16",
        ),
    )
}  # fmt: skip
"""Jobs for a GPU by name: one epoch of each network of the experiments, the public benchmark of simulators, and
transformers."""
