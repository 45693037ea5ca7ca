"""Copies of modules, also of those that keep something of their last pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def copied(module: Module) -> Module:
    """A deep copy of a module that has been run. What it keeps of a pass, be it a map of attention or a weight that a
    hook computes, comes without the graph that it was computed by: torch refuses to copy those."""
    kept = (tensor for part in module.modules() for tensor in _tensors(vars(part), set()) if tensor.grad_fn is not None)
    return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in kept})


def _tensors(value: object, seen: set[int]) -> Iterator[Tensor]:
    """The tensors in a value and in the lists, tuples and dicts that it is made of, each of which is looked at once."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner, seen)
