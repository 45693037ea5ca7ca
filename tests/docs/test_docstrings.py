"""The examples in docstrings print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import fedlalr

OPTIONAL = ("flwr", "cryptography", "triton", "datasets", "mlflow", "tensorboard")
"""Libraries of extras: a module that needs one is left out where it is missing."""
MODULES = sorted(module.name for module in pkgutil.walk_packages(fedlalr.__path__, "fedlalr."))


def test_every_module_can_be_imported_and_its_examples_print_what_they_show() -> None:
    tried = 0
    for name in MODULES:
        if name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
                raise
            continue
        results = doctest.testmod(module)
        assert results.failed == 0, name
        tried += results.attempted
    assert tried > 50, "hardly any example was found"
