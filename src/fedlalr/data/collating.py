"""From samples to a batch: inputs and targets as trees of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedlalr.data.trees import Tree, as_tree, named_leaves
from fedlalr.hf import next_tokens

Collate = Callable[[list[Any]], Any]
"""From a list of samples to a batch, as in torch's DataLoader: a dict, or a pair (inputs, targets)."""


@dataclass(frozen=True)
class NextTokens:
    """The targets are labels of tokens in a dict, each to be predicted one place earlier."""

    key: str | None
    ignored: int
    """The label that the loss ignores."""


Target = str | Sequence[str] | NextTokens
"""The key of the targets in a dict, or several keys, whose targets then are a dict."""
TARGETS = ("labels", "label")
"""Keys of the targets in a dict, unless the caller names others."""
LIKELY_TARGETS = ("y", "target", "targets")
"""Other keys that an error proposes."""


def split(sample: Mapping[str, Any], target: Target | None, whose: str) -> tuple[dict[str, Any], Any]:
    """Inputs and targets of a dict that holds both."""
    if isinstance(target, NextTokens):
        if target.key is None and not any(name in sample for name in TARGETS):
            raise ValueError(
                f"{whose} samples are dicts of {_shown(sample)}, without labels. Those of a causal language model "
                f"are the input_ids, with -100 where attention_mask is 0; "
                f"collate_fn=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False) adds them"
            )
        inputs, labels = split(sample, target.key, whose)
        return inputs, next_tokens(labels, target.ignored)
    chosen = target if target is not None else next((name for name in TARGETS if name in sample), None)
    if chosen is None:
        likely = next((name for name in (*LIKELY_TARGETS, *list(sample)[-1:]) if name in sample), "y")
        raise ValueError(
            f"{whose} samples are dicts of {_shown(sample)}, without labels or label; name the target's key with "
            f"target=, such as target={likely!r}"
        )
    names = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    missing = [name for name in names if name not in sample]
    if missing:
        raise ValueError(f"{whose} samples have no key {missing[0]!r} for target=; they have {_shown(sample)}")
    inputs = {name: part for name, part in sample.items() if name not in names}
    if not inputs:
        raise ValueError(f"{whose} samples have only the target's key, {names[0]!r}; the model needs inputs too")
    return inputs, sample[chosen] if isinstance(chosen, str) else {name: sample[name] for name in names}


def collate(
    samples: list[Any], whose: str, target: Target | None = None, collate_fn: Collate | None = None
) -> tuple[Tree, Tree]:
    """The batch of some samples: by the caller's function, or by stacking each part of equal shapes."""
    if collate_fn is not None:
        return _by_caller(samples, whose, target, collate_fn)
    pairs = [_parts(sample, whose, target) for sample in samples]
    inputs, targets = zip(*pairs, strict=True)
    return _stack(list(inputs), whose, "input"), _stack(list(targets), whose, "target")


def _by_caller(samples: list[Any], whose: str, target: Target | None, collate_fn: Collate) -> tuple[Tree, Tree]:
    try:
        found = collate_fn(samples)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"collate_fn cannot form a batch of {whose} samples: {reason}") from error
    parts: Any = split(found, target, whose) if isinstance(found, Mapping) else found
    if not isinstance(parts, tuple | list) or len(parts) != 2:
        raise ValueError(
            f"collate_fn must return a dict of tensors or a pair (inputs, targets), not a {type(found).__name__}"
        )
    for what, part in zip(("inputs", "targets"), map(as_tree, parts), strict=True):
        for name, leaf in named_leaves(part).items():
            if not isinstance(leaf, Tensor):
                raise ValueError(f"collate_fn must return tensors, but {what}{name} is a {type(leaf).__name__}")
            if not leaf.dim() or len(leaf) != len(samples):
                raise ValueError(
                    f"collate_fn returned {what}{name} of shape {tuple(leaf.shape)} for {len(samples)} samples; the "
                    f"first dimension must be the samples"
                )
    return as_tree(parts[0]), as_tree(parts[1])


def _parts(sample: Any, whose: str, target: Target | None) -> tuple[Any, Any]:
    if isinstance(sample, Mapping):
        # in torch's default dtype, as lists of numbers are, where default_collate would use float64
        values = {name: torch.tensor(value) if type(value) is float else value for name, value in sample.items()}
        return split(values, target, whose)
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        found = f"a {type(sample).__name__}"
        if isinstance(sample, tuple | list):
            found = f"{len(sample)} items; return several inputs as a tuple, ((first, second), target)"
        raise ValueError(f"{whose} data set must return (input, target) or a dict for a sample, not {found}")
    return sample[0], sample[1]


def _stack(parts: list[Any], whose: str, what: str) -> Tree:
    """One part of all samples as a tree of tensors."""
    first = parts[0]
    if isinstance(first, Mapping):
        if odd := {str(name) for part in parts for name in part.keys() ^ first.keys()}:
            raise ValueError(f"{whose} samples have different keys, such as {', '.join(sorted(odd))}")
        return {name: _stack([part[name] for part in parts], whose, f"{what} {name!r}") for name in first}
    if isinstance(first, tuple) and any(isinstance(one, Tensor | np.ndarray) for one in first):
        columns = enumerate(zip(*parts, strict=True))
        return tuple(_stack(list(mine), whose, f"{what} {place}") for place, mine in columns)
    if isinstance(first, str):
        raise ValueError(
            f"{whose} samples have text as their {what}; convert words to numbers, such as indices in a vocabulary, or "
            f"leave it out (dataset.remove_columns(names) of Hugging Face datasets)"
        )
    try:
        stacked = torch.tensor(parts) if _is_numbers(first) else default_collate(parts)
    except (RuntimeError, TypeError, ValueError) as error:
        why = _different_shapes(what, parts)
        if why or _is_numbers(first) or not isinstance(error, TypeError):
            raise ValueError(f"{whose} samples{why or f': {error}'}") from error
        stacked = None  # objects that torch does not know, such as images
    if not isinstance(stacked, Tensor):
        raise ValueError(
            f"{whose} data set must return tensors, arrays or numbers as the {what} of a sample, or a tuple or dict of "
            f"them, not a {type(first).__name__}; convert it with torch.tensor(values)"
        )
    return stacked


def _different_shapes(what: str, parts: list[Any]) -> str:
    """The end of the error for samples that do not fit into one batch; empty if their shapes are not the reason."""
    shapes = {(len(part),) if isinstance(part, list) else tuple(getattr(part, "shape", ())) for part in parts}
    if len(shapes) < 2:
        return ""
    kind, _, name = what.partition(" ")
    return (
        f" have {f'{kind}s {name}'.strip()} of different shapes, such as {' and '.join(map(str, sorted(shapes)[:2]))}; "
        f"pass collate_fn=, a function that pads the samples of a batch, or use one shape"
    )


def _shown(names: Iterable[object]) -> str:
    """The first few names."""
    every = [repr(name) for name in names]
    return ", ".join(every[:5]) + (", …" if len(every) > 5 else "")


def _is_numbers(value: object) -> bool:
    """Whether a value is a list of numbers, or of such lists, as data sets of Python objects return them."""
    if not isinstance(value, list):
        return False
    return not value or isinstance(value[0], int | float) or _is_numbers(value[0])
