"""A federation of real Flower processes for the tests of a file."""

from __future__ import annotations

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
