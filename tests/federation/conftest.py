"""Prints the counts of the fault tests at the end of a session."""

import pytest

from federation import fault_counts


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := list(fault_counts.summary()):
        terminalreporter.section("faults", sep="-")
        for line in lines:
            terminalreporter.write_line(line)
