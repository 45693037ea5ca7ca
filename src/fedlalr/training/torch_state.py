"""Global state that must not leak into or out of a run: modes, generators, threads, buffers, copies of modules."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedlalr.data.random import MODULES, key
from fedlalr.training.interfaces import Buffers, Training
from fedlalr.training.torch_internals import saved_buffers

Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep the caller's inference mode, autocast and no_grad out of a run.

    Inside another autocast, torch would reuse cast weights from one local step in the next, although the weights have
    changed. So casts are not cached.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False, cache_enabled=False),
    ):
        yield


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put all layers in one mode; afterwards restore each layer's own mode."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


@contextmanager
def number_of_threads(count: int) -> Iterator[None]:
    """Compute with this many threads: with a different number, sums may round differently."""
    before = torch.get_num_threads()
    if before != count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if before != count:
            torch.set_num_threads(before)


@contextmanager
def forked_generators(device: torch.device) -> Iterator[None]:
    """Draw from the global generators of torch, NumPy and Python without advancing them for the caller."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def host_generators() -> tuple[object, ...]:
    """The states of NumPy's and Python's global generators, to be compared."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


@contextmanager
def module_randomness(training: Training, round: int) -> Iterator[None]:
    """Seed the generators, from which dropout draws, by (seed, round); the caller's state is restored afterwards."""
    with forked_generators(training.device):
        seed_generators(training.device, key(training.seed, MODULES, round))
        yield


def seed_generators(device: torch.device, number: int) -> None:
    """Seed the global generators of torch, from which dropout draws, NumPy and Python.

    On a CPU or CUDA not `torch.manual_seed`: for every absent kind of device it records the caller's stack, which takes
    a millisecond.
    """
    random.seed(number)
    np.random.seed(number % 2**32)
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(number)
        return
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)


def get_buffers(model: nn.Module) -> Buffers:
    """A copy of a module's buffers by name. Those that are not saved with it, such as position ids, are constants:
    they are neither sent nor averaged."""
    return {name: buffer.detach().clone() for name, buffer in saved_buffers(model).items()}


def set_buffers(model: nn.Module, buffers: Buffers) -> None:
    """Write buffers into a module."""
    with torch.no_grad():
        for name, buffer in saved_buffers(model).items():
            buffer.copy_(buffers[name])


def copied(module: Module) -> Module:
    """A deep copy of a module that has been run. Tensors it keeps from a forward pass, such as an attention map or a
    weight computed by a hook, are copied without their graph, which torch cannot copy."""
    kept = (tensor for part in module.modules() for tensor in _tensors(vars(part), set()) if tensor.grad_fn is not None)
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in kept})


def private_copy(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> tuple[nn.Module, torch.dtype | None]:
    """A copy of the module to train, and the dtype to compute in if it differs from that of the parameters."""
    try:
        private = copy.deepcopy(model).to(device)
    except RuntimeError as error:
        if "deepcopy" not in str(error):
            raise
        raise ValueError(
            "the model cannot be copied, because it keeps a tensor computed from its parameters, which training "
            "would not reach: compute it in forward, or set it to None if it is left over from a forward pass; instead "
            "of torch.nn.utils.weight_norm and spectral_norm use those of torch.nn.utils.parametrizations"
        ) from error
    if dtype in (torch.float32, torch.float64):
        # `to` would drop the imaginary part of complex buffers
        return private.double() if dtype == torch.float64 else private.float(), None
    return private, dtype


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a value and in the lists, tuples and dicts inside it, each visited once."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner, seen)
