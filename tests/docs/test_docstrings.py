"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fedlalr

OPTIONAL = ("flwr", "cryptography", "triton", "datasets", "mlflow", "tensorboard")
"""Libraries of extras: a module that needs one is left out where it is missing."""
MODULES = sorted(module.name for module in pkgutil.walk_packages(fedlalr.__path__, "fedlalr."))


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_the_examples_of_a_module_print_what_they_show(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
    assert doctest.testmod(module).failed == 0
