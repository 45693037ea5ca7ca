"""The hardware of a run: cores, memory, and whether half precision works."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch

from fedlalr.training.ranks import own_gpu

TRIAL = """
import torch
from torch import nn
for module in (nn.Linear(9, 8), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, groups=8)):
    with torch.autocast("cpu", torch.DTYPE):
        outputs = module(torch.ones(2, 8, 9, 9, requires_grad=True))
    outputs.float().sum().backward()
"""
"""The most common operations of a run in bfloat16 or float16, forward and backward."""
FEWER_INSTRUCTIONS = ("ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16", "ONEDNN_MAX_CPU_ISA=AVX2")
"""Settings that stop torch from using instructions that some virtual machines announce but lack, fastest first."""


def choose_device(device: str | torch.device) -> torch.device:
    """`"auto"` is the current CUDA device if there is one (under torchrun, each process's own), else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"there is no device {device!r}; use 'auto', 'cpu', 'cuda' or 'cuda:0'") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:0'")
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {device!r} was requested, but this machine has no usable CUDA device; use device='cpu'"
        )
    return own_gpu(chosen)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warn_if_busy() -> None:
    """Warn, with the setting that helps, if other programs already use every core. The number of threads is never
    adapted to the load: sums would round differently, and a run must be repeatable."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if threads > 1 and os.getloadavg()[0] > cores:  # of the whole machine, not only this process's cores
        warnings.warn(
            f"this machine is busy: other programs use all of its {cores} cores, and torch's {threads} threads wait "
            f"for each other, which can make a run 20 times slower; set OMP_NUM_THREADS=1 or call "
            f"torch.set_num_threads(1) before the run",
            RuntimeWarning,
            stacklevel=4,
        )


def memory() -> int:
    """Bytes that this process may use: the machine's memory, or the limit of its container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(file).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # no such control group, or one without a limit
            continue
    return min(limits)


def hardware(device: str) -> str:
    """The name of a device; for a CPU, the name of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


@cache
def half_precision_fault(dtype: torch.dtype) -> tuple[str, str] | None:
    """How bfloat16 or float16 kills a process on this CPU, and what to do about it; None if it works.

    Tried in a separate process: an illegal instruction cannot be caught.
    """
    name = str(dtype).removeprefix("torch.")
    ended = _end_of_trial(name)
    if ended in (0, 1):  # 1: an exception, which a run reports itself
        return None
    helps = [setting for setting in FEWER_INSTRUCTIONS if _end_of_trial(name, setting) == 0]
    advice = f"set {helps[0]}, which makes it work, or compute in float32" if helps else "compute in float32"
    return f"{name} kills a process on this CPU (exit code {ended})", advice


def _end_of_trial(dtype: str, setting: str = "") -> int:
    """The exit code of the trial in a new process; if negative, the signal that ended it."""
    variable, _, value = setting.partition("=")
    environment = os.environ | ({variable: value} if variable else {})
    command = [sys.executable, "-c", TRIAL.replace("DTYPE", dtype)]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode
