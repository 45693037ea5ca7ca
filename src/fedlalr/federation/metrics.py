"""Measures of the caller's own: any number that can be told from all outputs and targets of the test set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

import torch
from torch import Tensor

Measure = Callable[[Tensor, Tensor], SupportsFloat]
"""Of all outputs and all targets, on the CPU and in float32 at least, to one number."""
Measures = Mapping[str, Measure]


def check_measures(measures: object, test: object) -> None:
    """Refuse what is no table of functions, and measures of nothing."""
    if measures is None:
        return
    if not isinstance(measures, Mapping):
        raise TypeError(f"measures must be a table of names and functions, such as {{'auc': auc}}, not {measures!r}")
    for name, measure in measures.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"a measure's name must be a text that is not empty, not {name!r}")
        if not callable(measure):
            raise TypeError(f"the measure {name!r} must be a function of (outputs, targets), not {measure!r}")
    if measures and test is None:
        raise ValueError("measures are taken on the test set; pass test=(inputs, targets), too")


def take(measures: Measures | None, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, float]:
    """Every measure of the outputs and targets of all batches together."""
    if not measures or not outputs:
        return {}
    whole = torch.cat(list(outputs)), torch.cat(list(targets))
    taken = {}
    for name, measure in measures.items():
        try:
            taken[name] = float(measure(*(part.clone() for part in whole)))  # each its own, should it write into them
        except Exception as error:
            shapes = " and ".join(f"{tuple(part.shape)} {part.dtype}" for part in whole)
            raise ValueError(
                f"the measure {name!r} gives no number for outputs and targets of {shapes}: "
                f"{type(error).__name__}: {error}. Where there is none to give, let it return math.nan; a run with a "
                f"run_dir goes on with resume=True from its last checkpoint"
            ) from error
    return taken


def readable(batch: object) -> Tensor:
    """On the CPU, where other libraries can read it, in a precision that NumPy has."""
    if not isinstance(batch, Tensor):
        raise ValueError(f"measures need a model that gives one tensor, and this one gives a {type(batch).__name__}")
    batch = batch.detach().cpu()
    return batch.float() if batch.dtype in (torch.bfloat16, torch.float16) else batch
