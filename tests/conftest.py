"""Shared by all tests: one thread if no number is set (two beside another busy process stall), a seed, a federation."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import typer.testing
from torch import Tensor, nn

from fedlalr.data.sources import digits

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

gc.disable()  # until all tests are collected: modules that are imported live until the end

set_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""For every absent kind of device `torch.manual_seed` records the caller's stack, which takes a millisecond."""

Pairs = list[tuple[Tensor, Tensor]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")


LONGEST = ("test_interpreted.py", "test_distributed.py", "test_portable.py", "test_workers.py", "test_faults.py")
"""Files whose tests wait for other processes; run last, they would leave one of two test processes without work."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
    seed = config.getoption("--shuffle")
    if seed is not None:
        order = random.Random(seed)
        order.shuffle(items)
        files = {item.path: order.random() for item in items}
        items.sort(key=lambda item: files[item.path])  # a file's tests stay together: they share fixtures


def pytest_collection_finish() -> None:
    """Scan what was imported and collected for garbage no more: it is most of all objects."""
    gc.freeze()
    gc.enable()


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
    set_seed(seed)
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers in whatever order tests run."""
    set_seed(0)


@pytest.fixture
def clients() -> Pairs:
    return make_clients()


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture(autouse=True, scope="session")
def digits_read_once() -> Iterator[None]:
    """Hundreds of runs use the handwritten digits, and their text takes longer to read than a round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "_table", cache(digits._table))
        yield


@pytest.fixture(autouse=True, scope="session")
def commands_built_once() -> Iterator[None]:
    """Typer builds all commands anew for every call of one, which takes longer than most of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.testing._get_command))
        yield


@pytest.fixture(autouse=True, scope="session")
def quiet_machine() -> Iterator[None]:
    """The load of the machine that runs the tests is none of their business: a busy one would add a warning to runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
        yield
