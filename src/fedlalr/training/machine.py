"""What a run is computed on."""

from __future__ import annotations

import os
import platform
import warnings
from pathlib import Path

import torch


def usable_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warn_if_busy() -> None:
    """Name the setting that helps where other programs already use every core. The number of threads is never changed
    by load: sums may round differently with another, and a run must repeat."""
    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if threads > 1 and os.getloadavg()[0] > cores:  # of the whole machine, whichever cores this process may use
        warnings.warn(
            f"this machine is busy: other programs use all of its {cores} cores, and torch's {threads} threads wait "
            f"for each other, which can make a run 20 times slower; set OMP_NUM_THREADS=1 or call "
            f"torch.set_num_threads(1) before the run",
            RuntimeWarning,
            stacklevel=4,
        )


def memory() -> int:
    """Bytes that this process may use at most: what is built in, or the limit of its container."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(file).read_text(encoding="utf-8")))
        except (OSError, ValueError):  # no such control group, or one without a limit
            continue
    return min(limits)


def hardware(device: str) -> str:
    """The name of a device, for a CPU that of the processor."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
