"""The counts of the fault tests at the end of a session, and the example of attacks."""

import importlib.util
import sys
from pathlib import Path

import pytest

from federation import fault_counts

EXAMPLE = Path(__file__).parents[2] / "examples" / "attacks.py"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := list(fault_counts.summary()):
        terminalreporter.section("faults", sep="-")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def attacks():
    """`examples/attacks.py` as a module."""
    spec = importlib.util.spec_from_file_location("attacks", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["attacks"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["attacks"]
