"""Options, each defined once: type, default and documentation.

Everything else is derived from the definitions: the signature and help of `fl.run`, the checks, the configuration
schema, the fingerprint of a run, what a Flower node must agree on, and the table in the documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from torch import Tensor, nn

from fedlalr.common.option_types import Count, NotNegative, Positive, Seed, check_type
from fedlalr.training.intervals import Epochs, Interval

Loss = Callable[[Any, Tensor], Tensor]

Scope = Literal["client", "server", "run", "files"]
"""What an option affects: every client, the server, only this process, or the files of a run. The result of a run
depends on the first two."""


def option(
    default: Any, doc: str, *, scope: Scope = "client", check: Callable[[Any], None] | None = None, config: bool = True
) -> Any:
    """Define an option. `check`: for what its type cannot express; `config`: whether configuration files have it."""
    return field(default=default, metadata={"doc": doc, "scope": scope, "check": check, "config": config})


def _check_local(local: object) -> None:
    if not hasattr(local, "steps"):
        raise TypeError(f"local must be fl.Steps(K), fl.Epochs(E) or fl.LogInterval(start, base), not {local!r}")


def _check_patterns(patterns: object) -> None:
    if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"personal must be a list of patterns of parameter names, such as ['head.*'], not {patterns!r}")


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
    drop_last: bool = option(False, "Leave out the last batch of a pass if it is smaller than `batch_size`.")
    weight_decay: NotNegative = option(0.0, "Add this multiple of the parameters to every gradient (L2 penalty).")
    decoupled_weight_decay: NotNegative = option(
        0.0, "Multiply the parameters by 1 - lr * this before every local step, as AdamW does."
    )
    clip_norm: Positive | None = option(
        None, "Clip each client's gradient to this norm before every local step; None: no clipping."
    )
    personal: tuple[str, ...] = option(
        (),
        'Parameters that stay with each client and are never sent, as patterns of their names, such as `("head.*",)`.',
        check=_check_patterns,
    )
    buffers: Literal["average", "recalibrate", "local"] = option(
        "average",
        "Normalisation statistics: the mean of the clients' own, recalibrated with the new model, or local to each "
        "client.",
    )
    holdout: Positive | None = option(
        None,
        "Share of every client's samples to evaluate its model on instead of training; None: train on all.",
        check=_check_holdout,
    )
    loss: Loss = option(
        nn.functional.cross_entropy, "Loss function of (outputs, targets), a mean over the batch.", config=False
    )
    seed: Seed = option(0, "Seed of sampling, batch order, augmentation and dropout.")


def check_options(options: Any) -> None:
    """Reject a value that its option's type or check does not allow."""
    kinds = get_type_hints(type(options), include_extras=True)
    for each in fields(options):
        value = getattr(options, each.name)
        check_type(each.name, value, kinds[each.name])
        if check := each.metadata["check"]:
            check(value)


def options_in(kind: type, *scopes: Scope) -> list[Field[Any]]:
    """The options of a class in some scopes, in the order of their definition."""
    return [each for each in fields(kind) if each.metadata.get("scope") in scopes]
