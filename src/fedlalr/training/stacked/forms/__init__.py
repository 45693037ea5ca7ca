"""The paper's networks written for a stack of clients: same parameters and results, faster than vmap on a GPU.

`stacked_form(module, compute, sample)` returns the form of a module, if it has one. A form runs in plain PyTorch in the
parameters' own precision or, in bfloat16 on a GPU with Triton, through the kernels of `fedlalr.training.kernels`.
`inference_form` runs one network in evaluation mode through those kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedlalr.training.interfaces import Buffers
from fedlalr.training.stacked.forms.char_lstm import CharLSTMForm
from fedlalr.training.stacked.forms.convmixer import ConvMixerForm
from fedlalr.training.torch_internals import has_hooks

StackedForward = Callable[..., tuple[Any, Buffers]]
"""A network in training mode over a stack of clients, each with its own parameters, buffers and batch: a function of
(parameters, buffers, inputs, mask) that returns logits `[C, B, classes]` and the buffers afterwards.

Parameters and buffers are `[C, …]` under the module's names; parameters may be views of a flat `[C, P]`. Inputs are
`[C, B, …]`; `mask` `[C, B]` marks the real samples (None: all). Differentiable in the parameters; never synchronises
with the device.
"""


def stacked_form(module: nn.Module, compute: torch.dtype | None, sample: torch.Size) -> StackedForward | None:
    """The stacked form of a module for inputs whose samples have this shape, or None if there is none.

    `compute` is None for the parameters' own precision, or bfloat16 for the kernels, which must be available on the
    module's device.
    """
    if ConvMixerForm.fits(module, compute, sample):
        return ConvMixerForm(module, compute)
    return CharLSTMForm(module, compute) if CharLSTMForm.fits(module, compute, sample) else None


def inference_form(
    module: nn.Module, compute: torch.dtype | None, sample: torch.Size
) -> Callable[[Tensor], Tensor] | None:
    """A faster function from inputs to outputs of a module in evaluation mode, without gradients, or None.

    It reads the module's parameters and buffers at each call.
    """
    if compute is None or not ConvMixerForm.fits(module, compute, sample) or has_hooks(module):
        return None
    form = ConvMixerForm(module, compute)
    parameters = {name: parameter.detach()[None] for name, parameter in module.named_parameters()}
    buffers = {name: buffer[None] for name, buffer in module.named_buffers()}
    return lambda inputs: form.evaluate(parameters, buffers, inputs[None])[0]
