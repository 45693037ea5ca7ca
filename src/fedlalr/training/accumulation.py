"""Gradient accumulation: a local step averages the gradients of several micro-batches of `batch_size` samples.

The result is that of one batch with all their samples, up to rounding, in the memory of one micro-batch: for losses
that are means over samples, and for cross-entropy over labels of which some are ignored, such as tokens. BatchNorm
normalises each micro-batch by its own statistics, and updates its buffers once for each, as in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedlalr.data.trees import Tree, first_leaf
from fedlalr.training.stacked.masked_loss import has_tokens, ignored_label

Part = tuple[Tensor, Tensor, Tensor]
"""Losses `[…]` and gradients `[…, P]` of a micro-batch, and the number of terms `[…]` in each loss."""


def weighted_mean(parts: Iterable[Part]) -> tuple[Tensor, Tensor]:
    """The mean loss and gradient of micro-batches, weighted by their terms; gradients are overwritten.

    A loss without any term, which is NaN, does not count. Without any term at all the gradient is 0, as torch's is.
    """
    sums: list[Tensor] = []
    for loss, gradient, terms in parts:
        count, none = terms.to(gradient.dtype), terms == 0
        gradient.mul_(count.unsqueeze(-1)).masked_fill_(none.unsqueeze(-1), 0)
        part = [(loss * count).masked_fill(none, 0), gradient, count]
        sums = [total.add_(more) for total, more in zip(sums, part, strict=True)] if sums else part
    return sums[0] / sums[2], sums[1].div_(sums[2].clamp(min=1).unsqueeze(-1))


def terms_of(loss: object, targets: Tree, mask: Tensor | None = None) -> Tensor:
    """The number of terms in every client's mean loss, `[C]`: its samples, or its labels that cross-entropy does not
    ignore. Targets are a tree of `[C, B, …]`; `mask` (bool `[C, B]`) marks those that are real.

    >>> terms_of(torch.nn.functional.cross_entropy, torch.tensor([[1, 2, -100]]))
    tensor([2])
    """
    some = first_leaf(targets)
    counted = some.new_ones(some.shape[:2], dtype=torch.bool) if mask is None else mask
    ignored = ignored_label(loss)
    if ignored is not None and isinstance(targets, Tensor) and not targets.is_floating_point():
        counted = (targets != ignored) & counted.view(*counted.shape, *[1] * (targets.dim() - 2))
    return counted.flatten(1).sum(1)


def check_terms(loss: object, targets: Tree) -> None:
    """Reject a loss over several targets of a sample if the number of its terms is not known."""
    if has_tokens(targets) and ignored_label(loss) is None:
        raise ValueError(
            "accumulate > 1 weighs the gradients of batches by the terms in their losses. With several targets per "
            "sample, such as tokens, they are known for torch's cross_entropy only: use it as the loss, or accumulate=1"
        )


def has_single(counts: Tensor, size: int | None) -> Tensor:
    """Whether a batch with some number of samples ends in a micro-batch of a single one."""
    return counts == 1 if size is None else (counts > 0) & ((counts - 1) % size == 0)
