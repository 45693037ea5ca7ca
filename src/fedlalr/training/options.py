"""Options, each defined once: type, default and documentation.

Everything else is derived from the definitions: the signature and help of `fl.run`, the checks, the configuration
schema, the fingerprint of a run, what a Flower node must agree on, and the table in the documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from fedlalr.common.option_types import Count, NotNegative, Positive, Seed
from fedlalr.training.intervals import Epochs, Interval
from fedlalr.training.parameter_groups import Patterns, check_patterns

Loss = Callable[[Any, Any], Tensor]

Scope = Literal["client", "server", "run", "files"]
"""What an option affects: every client, the server, only this process, or the files of a run. The result of a run
depends on the first two."""


def option(
    default: Any, doc: str, *, scope: Scope = "client", check: Callable[[Any], None] | None = None, config: bool = True
) -> Any:
    """Define an option. `check`: for what its type cannot express; `config`: whether configuration files have it."""
    return field(default=default, metadata={"doc": doc, "scope": scope, "check": check, "config": config})


def _check_loss(loss: object) -> None:
    if isinstance(loss, str) and loss != "model":
        raise ValueError(f"loss must be a function of (outputs, targets), or 'model', not {loss!r}")


def _check_target(target: object) -> None:
    names = [target] if isinstance(target, str) else target
    are_names = isinstance(names, list | tuple) and names and all(isinstance(name, str) and name for name in names)
    if target is not None and not are_names:
        raise TypeError(f"target must be a key of the samples, such as 'y', or several in a list, not {target!r}")


def _check_collate_fn(collate_fn: object) -> None:
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"collate_fn must be a function of a list of samples, not {collate_fn!r}")


def _check_local(local: object) -> None:
    if not hasattr(local, "steps"):
        raise TypeError(f"local must be fl.Steps(K), fl.Epochs(E) or fl.LogInterval(start, base), not {local!r}")


def _check_holdout(share: float | None) -> None:
    if share is not None and share >= 1:
        raise ValueError(f"holdout must lie between 0 and 1, such as 0.2, not {share!r}")


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """How every client trains."""

    local: Interval = option(
        Epochs(1),
        "How long a client trains in a round: `fl.Epochs(E)`, `fl.Steps(K)` or `fl.LogInterval(start, base)`.",
        check=_check_local,
    )
    batch_size: Count | None = option(50, "Samples in a mini-batch; None: all of a client's samples.")
    drop_last: bool = option(
        False, "Leave out the last batch of a pass if it is smaller than `batch_size` (times `accumulate`)."
    )
    accumulate: Count = option(
        1,
        "Batches per local step; their gradients are averaged as in one batch of `accumulate` * `batch_size` samples.",
    )
    weight_decay: NotNegative = option(0.0, "Add this multiple of the parameters to every gradient (L2 penalty).")
    decoupled_weight_decay: NotNegative = option(
        0.0, "Multiply the `decayed` parameters by 1 - lr * this before every local step, as AdamW does."
    )
    decayed: Patterns | None = option(
        None,
        'Patterns of the parameters with decoupled weight decay, such as `("*.weight",)`; None: those with at least '
        "two dimensions, so neither biases nor norms.",
        check=partial(check_patterns, "decayed"),
    )
    clip_norm: Positive | None = option(
        None, "Clip each client's gradient to this norm before every local step; None: no clipping."
    )
    loss: Loss | Literal["model"] = option(
        nn.functional.cross_entropy,
        'Loss function of (outputs, targets), a mean over the batch; `"model"`: the loss that the model computes.',
        check=_check_loss,
        config=False,
    )
    target: str | Sequence[str] | None = option(
        None,
        "Key of the targets in samples that are dicts, or several keys; None: `labels` or `label`.",
        check=_check_target,
        config=False,
    )
    collate_fn: Callable[[list[Any]], Any] | None = option(
        None,
        "Makes a batch from a list of samples, as in torch's DataLoader; None: samples of equal shapes are stacked.",
        check=_check_collate_fn,
        config=False,
    )
    trainable: Patterns | None = option(
        None,
        'Patterns of the parameters to train, such as `("head.*", "*.bias")`; the others are frozen; None: all. '
        "Parameters without `requires_grad` stay frozen.",
        check=partial(check_patterns, "trainable"),
    )
    personal: Patterns | None = option(
        None,
        'Patterns of the parameters that stay with each client and are never sent, such as `("head.*",)`.',
        check=partial(check_patterns, "personal"),
    )
    buffers: Literal["average", "recalibrate", "local"] = option(
        "average",
        "Normalisation statistics: the mean of the clients' own, recalibrated with the new model, or local to each "
        "client.",
    )
    holdout: Positive | None = option(
        None,
        "Share of every client's samples to hold out for evaluating its model; None: train on all.",
        check=_check_holdout,
    )
    seed: Seed = option(0, "Seed of sampling, batch order, augmentation and dropout.")


def options_in(kind: type, *scopes: Scope) -> list[Field[Any]]:
    """The options of a class in some scopes, in the order of their definition."""
    return [each for each in fields(kind) if each.metadata.get("scope") in scopes]
