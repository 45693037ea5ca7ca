"""The interface of a stacked form of a network."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from fedlalr.training.interfaces import Buffers, Tensors
from fedlalr.training.kernels import kernels_available


class StackedForward(Protocol):
    """A network in training mode over a stack of clients, each with its own parameters, buffers and batch."""

    def __call__(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Buffers]:
        """Logits `[C, B, classes]` and the buffers afterwards.

        Parameters and buffers are `[C, …]` under the module's names; parameters may be views of a flat `[C, P]`. Inputs
        are `[C, B, …]`; `mask` `[C, B]` marks the real samples (None: all). Differentiable in the parameters; never
        synchronises with the device.
        """
        ...


def precision_fits(module: nn.Module, compute: torch.dtype | None) -> bool:
    """Whether a form can run in this precision on the module's device: its own always, bfloat16 by the kernels."""
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return False
    if compute is None:
        return True
    first = next(module.parameters())
    return compute == torch.bfloat16 and first.dtype == torch.float32 and kernels_available(first.device)
