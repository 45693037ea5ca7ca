"""How many clients fit into memory at once, measured with a few of them."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Slots
from fedlalr.training.interfaces import Training, Work
from fedlalr.training.torch_internals import DispatchMode, storage_address, tree_leaves
from fedlalr.training.torch_state import forked_generators

SHARE = {"cuda": 0.7, "cpu": 0.5}
"""How much of the free memory is used. A GPU is not shared, a CPU's memory is."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt."""


def fitting_clients(training: Training, work: Work, one_step: Callable[[Work], object], each: int | None = None) -> int:
    """How many of a cohort's clients fit into memory at once, from what one local step of a few of them takes.

    `each`: the memory of one client if it is known exactly and need not be measured.
    """

    def room() -> float:
        vector = training.layout.size * work.broadcast.x.element_size()
        replies = len(work.clients) * len(training.algorithm.slots.up) * vector
        return SHARE[training.device.type] * free_memory(training.device) - replies

    def taken(clients: int) -> int:
        return peak_memory(partial(one_step, _some(training, work, clients)), training.device)

    if each is None:
        try:
            few = taken(2)
            plenty = 2 * len(work.clients) * few < room()  # then one client's share of it need not be known
            each = few if plenty else (taken(4) - few) // 2
        except Exception:  # perhaps a client's faulty data; if it is memory, the round will find out and halve
            return len(work.clients)
    return max(int(room() // max(each, 1)), 1)


def _some(training: Training, work: Work, count: int) -> Work:
    """The round for the largest client several times and the smallest once."""
    sizes = training.clients.sizes
    clients = torch.tensor([int(sizes.argmax())] * (count - 1) + [int(sizes.argmin())], device="cpu")
    return replace(work.part(torch.zeros_like(clients)), clients=clients, probe=None)


def check_kept(row: Slots, clients: int, device: torch.device) -> None:
    """Reject a run in which this many clients keep more than fits into memory."""
    each = sum(value.nbytes for value in row.values())
    if each and each * clients > (free := free_memory(device)):
        raise ValueError(
            f"the clients keep {', '.join(row)} between rounds: {_amount(each)} for each of {clients:,} clients, "
            f"{_amount(each * clients)} in total, but {device} has only {_amount(free)} free; make fewer parameters "
            f"personal, or use fewer clients, a smaller model, or a machine with more memory"
        )


def _amount(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"


def peak_memory(function: Callable[[], object], device: torch.device) -> int:
    """The most bytes of new tensors that a call holds at once."""
    with forked_generators(device):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            function()
            torch.cuda.synchronize(device)
            return int(torch.cuda.max_memory_allocated(device) - before)
        with (meter := _Meter()):
            function()
        return meter.peak


class _Meter(DispatchMode):
    """Counts the bytes of storages that were created while it is active and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {_address(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _address(tensor) not in known | self._seen:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage_address(storage), storage.nbytes()
        self._seen.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.now -= size


def _address(tensor: Tensor) -> int:
    return storage_address(tensor.untyped_storage())


def free_memory(device: torch.device) -> int:
    """Free bytes on a device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    limits = [_machine_memory()]
    for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")):
            try:
                limits.append(int((folder / limit).read_text()) - int((folder / used).read_text()))
            except (OSError, ValueError):  # no such control group, or one without a limit
                continue
    return max(min(limits), 0)


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: half of the machine's memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def keep_freed_memory() -> None:
    """Let glibc, if it is the C library, keep up to 256 MB of freed memory for the next step.

    By default it returns temporaries of a few megabytes to the system after every step, which zeroes them again in the
    next: a third of the time of a small perceptron.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for option, value in ((_M_MMAP_THRESHOLD, 1 << 25), (_M_TRIM_THRESHOLD, 1 << 28), (_M_TOP_PAD, 1 << 25)):
        mallopt(option, value)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
