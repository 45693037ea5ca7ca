"""The caller's metrics: functions of all outputs and targets of the test set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import SupportsFloat

import torch
from torch import Tensor

Metric = Callable[[Tensor, Tensor], SupportsFloat]
"""A function from all outputs and all targets, on the CPU and at least in float32, to one number."""
Metrics = Mapping[str, Metric]


def check_metrics(metrics: object, test: object) -> None:
    """Reject non-mappings, and metrics without a test set."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must be a dict of names and functions, such as {{'auc': auc}}, not {metrics!r}")
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"a metric's name must be a non-empty string, not {name!r}")
        if not callable(metric):
            raise TypeError(f"the metric {name!r} must be a function of (outputs, targets), not {metric!r}")
    if metrics and test is None:
        raise ValueError("metrics are computed on the test set; pass test=(inputs, targets) too")


def metrics_of(metrics: Metrics | None, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, float]:
    """Every metric, over the outputs and targets of all batches."""
    if not metrics or not outputs:
        return {}
    whole = torch.cat(list(outputs)), torch.cat(list(targets))
    found = {}
    for name, metric in metrics.items():
        try:
            found[name] = float(metric(*(part.clone() for part in whole)))  # cloned, as a metric may write into them
        except Exception as error:
            shapes = " and ".join(f"{tuple(part.shape)} {part.dtype}" for part in whole)
            raise ValueError(
                f"the metric {name!r} failed on outputs and targets of {shapes}: "
                f"{type(error).__name__}: {error}. If it is undefined, return math.nan; a run with a "
                f"run_dir can be resumed from its last checkpoint with resume=True"
            ) from error
    return found


def readable(batch: object) -> Tensor:
    """A batch on the CPU, in a precision that NumPy supports, so that other libraries can read it."""
    if not isinstance(batch, Tensor):
        raise ValueError(f"metrics need a model that returns one tensor, not a {type(batch).__name__}")
    batch = batch.detach().cpu()
    return batch.float() if batch.dtype in (torch.bfloat16, torch.float16) else batch
