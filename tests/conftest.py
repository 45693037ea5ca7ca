"""Shared by all tests: one thread if no number is set (two beside another busy process stall), a seed, a federation."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedlalr.data.sources import digits

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

gc.disable()  # until all tests are collected: modules that are imported live until the end

Pairs = list[tuple[Tensor, Tensor]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        order = random.Random(seed)
        order.shuffle(items)
        files = {item.path: order.random() for item in items}
        items.sort(key=lambda item: files[item.path])  # a file's tests stay together: they share fixtures


WHOLE_RUNS = {"algorithms", "docs", "federation", "flower", "training"}
"""Folders of tests whose cases are runs that execute mostly the same lines."""
measured: set[object] = set()
"""Their tests of which a case has been run while coverage was measured."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measure coverage in the first of several cases, and in no test of random examples: it takes long.

    The marker `no_cover` of pytest-cov does not do: with every start, coverage patches `os._exit` once more.
    """
    test, tracer = getattr(item, "obj", None), sys.gettrace()
    random_examples = hasattr(test, "hypothesis") or item.path.name.startswith(("test_fuzz_", "test_audit"))
    if not hasattr(tracer, "stop") or not (random_examples or test in measured):
        if WHOLE_RUNS & set(item.nodeid.split("/")):
            measured.add(test)
        return (yield)
    tracer.stop()
    try:
        return (yield)
    finally:
        tracer.start()


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
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture
def clients() -> Pairs:
    return make_clients()


@pytest.fixture
def model() -> nn.Module:
    return make_model()


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of another library, which takes up to three times as long while coverage is measured."""

    @wraps(function)
    def quick(*arguments: object, **named: object) -> Any:
        tracer = sys.gettrace()
        if not hasattr(tracer, "stop"):  # none, or a debugger's
            return function(*arguments, **named)
        tracer.stop()  # unlike sys.settrace(None), it remembers which functions are being executed
        try:
            return function(*arguments, **named)
        finally:
            tracer.start()

    return quick


@pytest.fixture(autouse=True, scope="session")
def untraced_libraries() -> Iterator[None]:
    """Draw, read and write YAML without measuring coverage."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.gettrace() is not None:
            import yaml
            from matplotlib.backend_bases import FigureCanvasBase

            patch.setattr(FigureCanvasBase, "print_figure", untraced(FigureCanvasBase.print_figure))
            patch.setattr(yaml.SafeLoader, "get_single_node", untraced(yaml.SafeLoader.get_single_node))
            patch.setattr(yaml, "dump_all", untraced(yaml.dump_all))
        yield


@pytest.fixture(autouse=True, scope="session")
def digits_read_once() -> Iterator[None]:
    """Hundreds of runs use the handwritten digits, and their text takes longer to read than a round."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "_table", cache(digits._table))
        yield


@pytest.fixture(autouse=True, scope="session")
def quiet_machine() -> Iterator[None]:
    """The load of the machine that runs the tests is none of their business: a busy one would add a warning to runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
        yield
