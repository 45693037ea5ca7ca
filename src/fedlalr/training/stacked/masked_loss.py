"""The mean loss over the real samples of a padded batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedlalr.data.trees import Tree, leaves, length, map_tree, rows
from fedlalr.training.options import Loss
from fedlalr.training.torch_internals import tree_map

IGNORED_LABEL = -100
"""The label that torch's classification losses ignore by default."""


def mean_loss(loss: Any, outputs: object, targets: Tree, mask: Tensor | None, ignored: int | None = None) -> Tensor:
    """The user's loss of a batch as one number; if there is a mask (bool `[B]`), over the samples that it keeps, for a
    loss that is a mean over samples.

    Losses of the cross-entropy family ignore one label, so the padding gets that label and all their options keep their
    meaning. So does the caller's own loss with a label that it is known to ignore (`padding_label`); it may be a mean
    over tokens. Any other loss is computed sample by sample.
    """
    if mask is None:
        return loss(outputs, targets).reshape(())  # it may have shape [1]
    if _is_mean_over_classes(loss) and isinstance(targets, Tensor) and not targets.is_floating_point():
        ignored = ignored_label(loss)
    if ignored is not None:
        return loss(outputs, without_padding(targets, mask, ignored)).reshape(())

    def alone(output: object, target: Tree) -> Tensor:
        value = loss(tree_map(lambda tensor: tensor[None], output), map_tree(lambda leaf: leaf[None], target))
        return value.reshape(())

    each = vmap(alone, randomness="different")(outputs, targets)
    return torch.where(mask, each, 0.0).sum() / mask.sum().clamp(min=1)


def without_padding(targets: Tree, mask: Tensor, ignored: int = IGNORED_LABEL) -> Tree:
    """The targets `[…, B, …]` with the label to ignore for samples that `mask` `[…, B]` leaves out.

    Only whole numbers have such a label; other targets stay as they are.
    """

    def fill(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool:
            return leaf
        return leaf.masked_fill(~mask.view(*mask.shape, *[1] * (leaf.dim() - mask.dim())), ignored)

    return map_tree(fill, targets)


def padding_label(loss: Loss, outputs: object, targets: Tree) -> int | None:
    """The label that a loss of the caller's leaves out of its mean, so that padding may be marked with it, or None.

    Some samples are tried with the usual labels and the most frequent ones, on the CPU: elsewhere an index out of range
    cannot be caught.
    """
    outputs, targets = tree_map(lambda tensor: tensor.detach().cpu(), (outputs, targets))
    count = length(targets)
    mask = torch.arange(count, device="cpu") < max(count // 2, 1)
    labels = [label for leaf in leaves(targets) if not leaf.is_floating_point() for label in leaf.flatten().tolist()]
    frequent = [label for label, _ in Counter(labels).most_common(8)]
    for label in dict.fromkeys((IGNORED_LABEL, -1, 0, *frequent)):
        try:
            marked = loss(outputs, without_padding(targets, mask, label))
            right = loss(tree_map(lambda tensor: tensor[mask], outputs), rows(targets, mask))
        except Exception:  # such as a label out of range
            continue
        if torch.allclose(marked, right, rtol=1e-4, atol=1e-6):
            return int(label)
    return None


def has_tokens(targets: Tree) -> bool:
    """Whether targets are several whole numbers per sample. A mean over such targets may weigh samples differently."""
    return any(leaf.dim() > 1 and not leaf.is_floating_point() for leaf in leaves(targets))


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
