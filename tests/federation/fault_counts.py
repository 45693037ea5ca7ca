"""Counts of the fault tests for the terminal summary: deaths, fuzzed cases, rejections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

deaths: Counter[str] = Counter()
"""By event: kills, interrupts, half_written, resumed, disk failures."""
cases: Counter[str] = Counter()
rejected: Counter[str] = Counter()
"""Cases of each kind of input, and how many of them raised the documented error."""

PAYLOADS = ("replies", "arrays", "messages")
"""Kinds of input that come from clients."""


def summary() -> Iterator[str]:
    """The counts of this test session, as lines."""
    if deaths["kills"] or deaths["interrupts"]:
        yield (
            f"killed (SIGKILL) at {deaths['kills']:,} instants and interrupted (SIGINT) at {deaths['interrupts']:,}; "
            f"{deaths['half_written']:,} left a checkpoint half written; {deaths['resumed']:,} resumed runs compared"
        )
    if deaths["disk"]:
        yield f"disks that failed a run: {deaths['disk']:,}"
    for kind, count in cases.items():
        yield f"fuzzed {kind}: {count:,} cases, {rejected[kind]:,} rejected"
    if payloads := sum(rejected[kind] for kind in PAYLOADS):
        yield f"payloads rejected: {payloads:,}"
    if cases:
        yield f"cases fuzzed in all: {sum(cases.values()):,}"
