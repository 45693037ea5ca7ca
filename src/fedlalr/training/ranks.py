"""The processes that share a cohort, and what they exchange.

`ALONE` is the usual case, one process that has everything; its exchanges return their input. `ProcessRanks` are the
processes that torchrun started: NCCL between GPUs, gloo between CPUs, and a separate gloo group in which they agree
that no rank has failed before any of them waits for the others. So an error on one rank ends the run on all of them,
with its message, instead of leaving the others waiting.
"""

from __future__ import annotations

import atexit
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Value = TypeVar("Value")

_PATIENCE = timedelta(days=1)
"""How long ranks wait for the slowest; a rank that died is noticed immediately."""


class RankFailed(RuntimeError):
    """Another rank of the run failed or died. The server's state is as it was before the round."""


class Ranks:
    """One process that has the whole cohort."""

    rank = 0
    count = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and shows progress."""
        return self.rank == 0

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, `counts` of each, in order of rank."""
        return rows

    def gather_values(self, value: Value) -> list[Value]:
        """The values of all ranks, small and picklable, in order of rank."""
        return [value]

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sum over the ranks of each tensor."""
        return dict(tensors)

    def max(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The elementwise maximum over the ranks of each tensor."""
        return dict(tensors)

    def first(self, value: Value) -> Value:
        """The first rank's value."""
        return value

    def prepare(self, model: nn.Module, facts: Mapping[str, object]) -> None:
        """Reject ranks with different runs, and load the first rank's parameters and buffers into the module."""

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notify the other ranks if this one raises, and wait for them at the end."""
        yield


ALONE = Ranks()


class Spread(NamedTuple):
    """A stack whose rows are spread over the ranks, in order of rank."""

    ranks: Ranks = ALONE
    counts: tuple[int, ...] = ()
    """Rows on each rank."""

    @property
    def is_whole(self) -> bool:
        """Whether all rows are on this rank."""
        return self.ranks.count == 1

    @property
    def held(self) -> slice:
        """The rows on this rank."""
        before = sum(self.counts[: self.ranks.rank])
        return slice(None) if self.is_whole else slice(before, before + self.counts[self.ranks.rank])

    def mine(self, every: Tensor) -> Tensor:
        """This rank's rows of a tensor that has all rows."""
        return every[self.held]

    def gather(self, mine: Tensor) -> Tensor:
        """All rows of a tensor, from this rank's rows."""
        return self.ranks.gather(mine, self.counts)

    def rows(self, index: Tensor) -> tuple[Tensor, Spread]:
        """Select some rows, ascending: the local indices of those on this rank, and the spread of the selection."""
        if self.is_whole:
            return index, self
        ends = torch.tensor(self.counts, device="cpu").cumsum(0)
        counts = torch.bincount(torch.searchsorted(ends, index, right=True), minlength=len(ends)).tolist()
        spread = Spread(self.ranks, tuple(counts))
        return index[spread.held] - self.held.start, spread


WHOLE = Spread()


class ProcessRanks(Ranks):
    """The processes of an initialised process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.count, self.device = dist.get_rank(), dist.get_world_size(), device
        self._control = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def gather(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in counts]
        self._exchange(lambda: dist.all_gather(parts, padded))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def gather_values(self, value: Value) -> list[Value]:
        found: list[Any] = [None] * self.count
        self._exchange(lambda: dist.all_gather_object(found, value, group=self._control))
        return found

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._reduce(tensors, dist.ReduceOp.SUM)

    def max(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._reduce(tensors, dist.ReduceOp.MAX)

    def first(self, value: Value) -> Value:
        packed = io.BytesIO()
        if self.is_first:
            torch.save(value, packed)
        found: list[Any] = [packed.getvalue()]
        self._exchange(lambda: dist.broadcast_object_list(found, src=0, group=self._control))
        if self.is_first:
            return value
        # Tensors on the first rank's GPU belong on this rank's own GPU. Unpickling is safe: it comes from this program.
        return torch.load(io.BytesIO(found[0]), map_location=self.device, weights_only=False)

    def prepare(self, model: nn.Module, facts: Mapping[str, object]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        every = self.gather_values({**facts, "model": shapes})
        for rank, theirs in enumerate(every):
            for name, fact in every[0].items():
                if theirs[name] != fact:
                    raise ValueError(
                        f"all ranks must be given the same run, but {name} is {fact!r} on rank 0 and "
                        f"{theirs[name]!r} on rank {rank}"
                    )
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                same = tensor.detach().contiguous()
                self._exchange(partial(dist.broadcast, same, src=0))
                tensor.copy_(same)

    @contextmanager
    def watched(self) -> Iterator[None]:
        try:
            yield
            self._agree()
        except RankFailed:
            raise
        except Exception as error:
            self._agree(f"{type(error).__name__}: {error}")
            raise

    def _reduce(self, tensors: Mapping[str, Tensor], how: Any) -> dict[str, Tensor]:
        """Reduce tensors together, all of a dtype in one exchange."""
        reduced: dict[str, Tensor] = {}
        for dtype in {tensor.dtype: None for tensor in tensors.values()}:
            some = {name: tensor for name, tensor in tensors.items() if tensor.dtype == dtype}
            joined = torch.cat([tensor.detach().reshape(-1) for tensor in some.values()])
            self._exchange(partial(dist.all_reduce, joined, how))
            parts = torch.split(joined, [tensor.numel() for tensor in some.values()])
            reduced |= {name: part.view(some[name].shape) for name, part in zip(some, parts, strict=True)}
        return reduced

    def _exchange(self, operation: Callable[[], object]) -> None:
        self._agree()
        try:
            operation()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _agree(self, failure: str | None = None) -> None:
        """Synchronise with the others. A rank that failed passes its message, which the others raise."""
        flag = torch.tensor([failure is not None], dtype=torch.int32, device="cpu")
        messages: list[Any] = [None] * self.count
        try:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._control)
            if flag.item():
                dist.all_gather_object(messages, failure, group=self._control)
        except RuntimeError as error:
            if failure is not None:
                return  # this rank's error says more than the loss of the others
            raise self._lost(error) from error
        if failure is None and flag.item():
            raise RankFailed("; ".join(f"rank {rank} failed: {text}" for rank, text in enumerate(messages) if text))

    def _lost(self, error: RuntimeError) -> RankFailed:
        return RankFailed(f"rank {self.rank} lost the other ranks; one of them must have died: {error}")


_joined: dict[torch.device, ProcessRanks] = {}


def started_by_torchrun() -> bool:
    """Whether this is one of several processes of one run."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def process_rank() -> int:
    """The rank of this process, before the process group is initialised; 0 if it is the only one."""
    return int(os.environ.get("RANK", "0")) if started_by_torchrun() else 0


def join(device: torch.device) -> Ranks:
    """Join the other processes that torchrun started, on this machine or several; `ALONE` if there are none."""
    if not started_by_torchrun():
        return ALONE
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
        atexit.register(_leave)
    if device not in _joined:
        _joined[device] = ProcessRanks(device)
    return _joined[device]


def _leave() -> None:
    _joined.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def own_gpu(device: torch.device) -> torch.device:
    """The GPU of this process: with several processes on a machine, the one with the process's local rank."""
    if device.type != "cuda" or device.index is not None:
        return device
    if not started_by_torchrun():
        return torch.device("cuda", torch.cuda.current_device())
    number, there_are = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there_are:
        raise ValueError(
            f"process {number} on this machine has no GPU, as there are only {there_are}; "
            f"start at most --nproc-per-node {there_are}, or use device='cpu'"
        )
    return torch.device("cuda", number)
