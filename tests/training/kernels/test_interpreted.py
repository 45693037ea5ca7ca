"""The Triton kernels on a machine without a GPU: under Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(
    "file", ["test_triton_kernels.py", pytest.param("test_triton_convmixer.py", marks=pytest.mark.slow)]
)
def test_the_kernels_agree_with_the_plain_operations_under_tritons_interpreter(file: str) -> None:
    # oneDNN trusts what a processor says of its bfloat16 units; some virtual machines say so and have none
    environment = {**os.environ, "TRITON_INTERPRET": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    environment["PYTEST_XDIST_WORKER"] = "gw-interpreter"  # slipcover adds the lines that this process executes
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(here / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
