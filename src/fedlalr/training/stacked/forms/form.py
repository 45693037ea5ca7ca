"""What a stacked form of a network is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from fedlalr.training.kernels import kernels_available


class StackedForward(Protocol):
    """A network in training mode over a stack of clients, each with parameters, buffers and a batch of its own."""

    def __call__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits `[C, B, classes]` and the buffers afterwards.

        Parameters and buffers are `[C, …]` under the module's names; parameters may be views of a flat `[C, P]`. Inputs
        are `[C, B, …]`; `mask` `[C, B]` marks the samples that are real, None: all. It is differentiable in the
        parameters and never waits for the device.
        """
        ...


def precision_fits(module: nn.Module, compute: torch.dtype | None) -> bool:
    """Whether a form can run in this precision where the module is: its own always, bfloat16 through the kernels."""
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return False
    if compute is None:
        return True
    first = next(module.parameters())
    return compute == torch.bfloat16 and first.dtype == torch.float32 and kernels_available(first.device)
