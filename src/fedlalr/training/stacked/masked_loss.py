"""The mean loss over the real samples of a padded batch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedlalr.training.options import Loss
from fedlalr.training.torch_internals import tree_map

IGNORED_LABEL = -100
"""The label that torch's classification losses ignore by default."""


def mean_loss(loss: Loss, outputs: object, targets: Tensor, mask: Tensor | None) -> Tensor:
    """The user's loss of a batch, some samples of which may be padding, as one number."""
    value = loss(outputs, targets) if mask is None else masked_loss(loss, outputs, targets, mask)
    return value.reshape(())  # a loss may have shape [1]


def masked_loss(loss: Loss, outputs: object, targets: Tensor, mask: Tensor) -> Tensor:
    """The user's loss over the samples that `mask` (bool `[B]`) keeps, for a loss that is a mean over samples.

    Losses of the cross-entropy family ignore one label, so the padding gets that label and all their options keep their
    meaning. Any other loss is computed sample by sample.
    """
    ignored = ignored_label(loss)
    if ignored is not None and _is_mean_over_classes(loss) and not targets.is_floating_point():
        padding = ~mask.view(-1, *[1] * (targets.dim() - 1))
        return loss(outputs, targets.masked_fill(padding, ignored))

    def alone(output: object, target: Tensor) -> Tensor:
        return loss(tree_map(lambda tensor: tensor[None], output), target[None]).reshape(())

    each = vmap(alone, randomness="different")(outputs, targets)
    return torch.where(mask, each, 0.0).sum() / mask.sum().clamp(min=1)


def ignored_label(loss: object) -> int | None:
    """The label that a loss of the cross-entropy family (a function, a module or a partial) ignores.

    None for any other loss.

    >>> ignored_label(partial(nn.functional.cross_entropy, label_smoothing=0.1))
    -100
    """
    options = _class_options(loss)
    return None if options is None else int(options.get("ignore_index", IGNORED_LABEL))


def _is_mean_over_classes(loss: object) -> bool:
    options = _class_options(loss)
    known = {"weight", "ignore_index", "reduction", "label_smoothing"}
    return options is not None and options.get("reduction", "mean") == "mean" and options.keys() <= known


def _class_options(loss: object) -> Mapping[str, Any] | None:
    """The options of a loss of the cross-entropy family; None for any other loss."""
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        assert isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        return {"ignore_index": loss.ignore_index, "reduction": loss.reduction}
    given = loss if isinstance(loss, partial) and not loss.args else None
    function = loss if given is None else given.func
    if function is not nn.functional.cross_entropy and function is not nn.functional.nll_loss:
        return None
    return {} if given is None else given.keywords
