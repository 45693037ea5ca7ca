"""Images with their channels innermost, torch's `channels_last`, in which most convolutions are faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlalr.data.trees import Tree
from fedlalr.training.torch_state import forked_generators, in_mode


def in_channels_last(model: nn.Module, inputs: Tree) -> Callable[..., Any] | None:
    """The model in this format, for inputs like these; its own parameters keep theirs.

    None if it has no convolutions, or cannot run so: a model may call `view` on images, which needs the usual format.
    """
    last = partial(Tensor.to, memory_format=torch.channels_last)
    weights = {name: last(parameter) for name, parameter in model.named_parameters() if parameter.dim() == 4}
    if not weights or not isinstance(inputs, Tensor) or inputs.dim() != 4:
        return None

    def forward(images: Tensor, **named: Any) -> Any:
        return functional_call(model, weights, last(images), named)

    try:
        with torch.no_grad(), forked_generators(inputs.device), in_mode(model, training=False):
            forward(inputs[:1])
    except Exception:  # an error that has other reasons comes again without this format
        return None
    return forward
