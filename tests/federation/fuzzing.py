"""Properties of hostile input: a short form by default, thousands of cases under `make test-faults`."""

from __future__ import annotations

import resource
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation import fault_counts

SHORT, LONG = 60, 5000
SLOW, SLOW_LONG = 20, 1000
"""The same for a slow property."""
MEMORY = 700 << 20
"""Bytes by which a property may raise the process's peak memory."""


def fuzz(
    kind: str, short: int = SHORT, **strategies: st.SearchStrategy[Any]
) -> Callable[[Callable[..., bool]], Callable[..., None]]:
    """Run a property in its short form by default and in its long form under the marker `faults`.

    The property returns whether the input was accepted; otherwise it was rejected with the documented error.
    """

    def decorate(check: Callable[..., bool]) -> Callable[..., None]:
        long = SLOW_LONG if short == SLOW else LONG

        @pytest.mark.parametrize(
            "examples", [short, pytest.param(long, marks=[pytest.mark.faults, pytest.mark.timeout(3600)])]
        )
        def test(examples: int) -> None:
            @settings(
                max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None,
                derandomize=examples == short,
            )  # fmt: skip
            @given(**strategies)
            def body(**drawn: Any) -> None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    taken = check(**drawn)
                assert isinstance(taken, bool)
                fault_counts.cases[kind] += 1
                fault_counts.rejected[kind] += not taken

            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            body()
            assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY

        test.__doc__ = check.__doc__
        return test

    return decorate


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """A damaged copy: truncated, with flipped bits, repeated, extended, or replaced."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(content) - 1, 0)))
        match draw(st.sampled_from(["flip", "cut", "insert", "repeat", "zero", "number", "other"])):
            case "flip" if content:
                content[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del content[place : place + draw(st.integers(1, 64))]
            case "insert":
                content[place:place] = draw(st.binary(max_size=16))
            case "repeat":
                content[place:place] = content[place : place + 32]
            case "zero":
                content[place : place + 8] = bytes(8)
            case "number":
                content[place : place + 8] = draw(st.sampled_from([b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"99999999"]))
            case "other":
                content = bytearray(draw(st.binary(max_size=64)))
    return bytes(content)
