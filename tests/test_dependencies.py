"""What pyproject.toml says about dependencies, beside the versions that are pinned and the oldest ones."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDS = [Requirement(need) for need in sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])]


def pins(text: str) -> dict[str, str]:
    """Versions by name, of lines such as `torch==2.13.0`."""
    lines = [Requirement(line) for line in text.splitlines() if not line.startswith("#")]
    return {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in lines}


@pytest.mark.parametrize("need", NEEDS, ids=str)
def test_the_pinned_version_is_in_the_range(need: Requirement) -> None:
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert need.specifier.contains(pinned[canonicalize_name(need.name)])


def test_the_oldest_version_of_every_dependency_is_known_and_in_the_range() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "oldest.py"], capture_output=True, text=True, check=True)
    oldest = pins(done.stdout)
    assert set(oldest) == {canonicalize_name(need.name) for need in NEEDS}
    for need in NEEDS:
        version = oldest[canonicalize_name(need.name)]
        assert f">={version}" in str(need.specifier).split(",")
        assert need.specifier.contains(version)
