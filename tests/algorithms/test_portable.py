"""The derivations again as other processors compute them: with fewer instructions, in other orders of sums."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from algorithms.test_derivations import CASES

OTHER_PROCESSORS = {
    "no vectors": ({"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, "ragged"),
    "AVX2": ({"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}, "growing"),
}
"""Beside the instructions of this machine, which all other tests use: settings, and which batches to try.
`make test-portable` tries all batches and more settings."""


@pytest.mark.parametrize(("settings", "batches"), OTHER_PROCESSORS.values(), ids=OTHER_PROCESSORS)
def test_every_method_follows_its_derivation_on_another_processor(settings: dict[str, str], batches: str) -> None:
    here = Path(__file__).parent
    plugins = [word for name in ("cacheprovider", "xdist", "cov") for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", *plugins, str(here / "test_derivations.py")]
    command += ["-m", "", "-k", f"every_slot and {batches}"]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV")}  # covered by this process
    done = subprocess.run(command, env=plain | settings, capture_output=True, text=True, cwd=here.parents[1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CASES)} passed" in done.stdout
