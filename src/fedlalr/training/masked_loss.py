"""The mean loss over the real samples of a padded batch."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedlalr.training.work import Loss


def masked_loss(loss: Loss, outputs: object, targets: Tensor, mask: Tensor) -> Tensor:
    """The user's loss over the samples that `mask` (bool `[B]`) keeps, for a loss that is a mean over samples.

    Losses of the cross-entropy family pass over a label by themselves, so the padding gets that label and every option
    they have keeps its meaning. Any other loss is asked sample by sample.
    """
    ignored = ignored_label(loss)
    if ignored is not None and not targets.is_floating_point():
        padding = ~mask.view(-1, *[1] * (targets.dim() - 1))
        return loss(outputs, targets.masked_fill(padding, ignored))

    def alone(output: object, target: Tensor) -> Tensor:
        return loss(tree_map(lambda tensor: tensor[None], output), target[None])

    each = vmap(alone, randomness="different")(outputs, targets)
    return torch.where(mask, each, 0.0).sum() / mask.sum().clamp(min=1)


def ignored_label(loss: Loss) -> int | None:
    """The label that a loss passes over, for the losses known to take a mean over the rest."""
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        assert isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)
        return loss.ignore_index if loss.reduction == "mean" else None
    function, options = loss, {}
    if isinstance(loss, partial) and not loss.args:
        function, options = loss.func, loss.keywords
    if function not in (nn.functional.cross_entropy, nn.functional.nll_loss):
        return None
    unknown = options.keys() - {"weight", "ignore_index", "reduction", "label_smoothing"}
    if unknown or options.get("reduction", "mean") != "mean":
        return None
    return int(options.get("ignore_index", -100))
