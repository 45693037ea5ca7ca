"""Batches are trees: a tensor, a tuple of trees or a dict of trees, each tensor with the samples along dimension 0.

A model's inputs are such a tree, and so are its targets. Whatever is neither a tuple nor a dict is a leaf: a tensor, or
an object that is indexed like one.

>>> batch = {"ids": torch.zeros(4, 3), "mask": torch.ones(4, 3)}
>>> length(batch), list(map_tree(len, batch).values()), rows(batch, torch.tensor([0, 2]))["ids"].shape
(4, [4, 4], torch.Size([2, 3]))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tree = Tensor | tuple[Any, ...] | dict[str, Any]
"""A tensor, or a tuple or dict of trees."""


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """The tree of a function's results on the leaves; `others` are trees of the same form, for further arguments."""
    if isinstance(tree, dict):
        return {name: map_tree(function, part, *(other[name] for other in others)) for name, part in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, *parts) for parts in zip(tree, *others, strict=True))
    return function(tree, *others)


def leaves(tree: Any) -> list[Any]:
    """The leaves in order."""
    return list(named_leaves(tree).values())


def named_leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """The leaves by name, such as `['input_ids']` or `[0]`; a lone leaf has none.

    >>> list(named_leaves({"ids": torch.zeros(2), "more": (torch.zeros(2), torch.zeros(2))}))
    ["['ids']", "['more'][0]", "['more'][1]"]
    """
    if isinstance(tree, dict | tuple):
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {path: leaf for key, part in parts for path, leaf in named_leaves(part, f"{name}[{key!r}]").items()}
    return {name: tree}


def first_leaf(tree: Any) -> Any:
    """One leaf, for what all leaves have in common."""
    while isinstance(tree, dict | tuple):
        tree = next(iter(tree.values())) if isinstance(tree, dict) else tree[0]
    return tree


def length(tree: Any) -> int:
    """The number of samples."""
    return len(first_leaf(tree))


def device_of(tree: Any) -> torch.device:
    """The device of the leaves."""
    return first_leaf(tree).device


def rows(tree: Any, index: Any) -> Any:
    """Some of the samples."""
    return map_tree(lambda leaf: leaf[index], tree)


def reshaped(tree: Any, shape: torch.Size) -> Any:
    """The tree with the first dimension of its leaves in another shape."""
    return map_tree(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), tree)


def moved(tree: Any, device: torch.device) -> Any:
    """The tree on a device."""
    return map_tree(lambda leaf: leaf.to(device), tree)


def as_tree(value: Any) -> Any:
    """A mapping of another type, such as a tokenizer's result, as a dict; anything else as it is."""
    if isinstance(value, Mapping):
        return {name: as_tree(part) for name, part in value.items()}
    return tuple(map(as_tree, value)) if type(value) is tuple else value


def is_tree(value: object) -> bool:
    """Whether all leaves, of which there is at least one, are tensors."""
    found = leaves(value)
    return bool(found) and all(isinstance(leaf, Tensor) for leaf in found)
