"""Shared by all tests: one thread (two beside another busy process stall), and a small federation to train on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)

Pairs = list[tuple[Tensor, Tensor]]


def make_clients(sizes: tuple[int, ...] = (7, 12, 5, 9, 10), features: int = 4, seed: int = 0) -> Pairs:
    """Clients of unequal sizes with three linearly separable-ish classes, float64."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, features, generator=generator, dtype=torch.float64) * 2
    pairs = []
    for size in sizes:
        targets = torch.randint(0, 3, (size,), generator=generator)
        noise = torch.randn(size, features, generator=generator, dtype=torch.float64)
        pairs.append((centres[targets] + noise, targets))
    return pairs


def make_model(seed: int = 0, features: int = 4) -> nn.Module:
    """A two-layer network in float64."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.fixture
def clients() -> Pairs:
    return make_clients()


@pytest.fixture
def model() -> nn.Module:
    return make_model()
