"""A federation of real Flower processes for the tests of a file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fedlalr.flower.local.launch import LocalFederation


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[LocalFederation]:
    """A superlink and three nodes, with TLS and node keys; `flower.deployed` starts runs on them.

    Only a file with `DATABASE = True` has a database: it doubles the superlink's work.
    """
    from flower.deployed import start

    federation = start(tmp_path_factory.mktemp("federation"), database=getattr(request.module, "DATABASE", False))
    yield federation
    federation.__exit__(None, None, None)
    assert federation.processes.members() == []


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What Flower logs. Pytest's own way would add a handler to each of torch's many loggers for each test."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("flwr").addHandler(handler)
    yield messages
    logging.getLogger("flwr").removeHandler(handler)
