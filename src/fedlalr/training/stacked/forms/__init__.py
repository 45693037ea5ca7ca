"""The paper's networks written for a stack of clients: the same parameters and results, on a GPU faster than vmap.

`stacked_form(module, compute, sample)` gives one where there is one. A form runs either in plain PyTorch, in the
parameters' own precision, or (asked for bfloat16, on a GPU with Triton) through the kernels of
`fedlalr.training.kernels`. `inference_form` gives one network in evaluation mode through those kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedlalr.training.stacked.forms.char_lstm import CharLSTMForm
from fedlalr.training.stacked.forms.convmixer import ConvMixerForm
from fedlalr.training.stacked.forms.form import StackedForward
from fedlalr.training.torch_internals import has_hooks

__all__ = ["StackedForward", "inference_form", "stacked_form"]


def stacked_form(module: nn.Module, compute: torch.dtype | None, sample: torch.Size) -> StackedForward | None:
    """A stacked form of a module for inputs whose samples have this shape, or None where there is none.

    `compute` is None for the parameters' own precision or bfloat16 for the kernels, which the module's device must
    have.
    """
    forms: tuple[type[ConvMixerForm] | type[CharLSTMForm], ...] = (ConvMixerForm, CharLSTMForm)
    for form in forms:
        if form.fits(module, compute, sample):
            return form(module, compute)
    return None


def inference_form(
    module: nn.Module, compute: torch.dtype | None, sample: torch.Size
) -> Callable[[Tensor], Tensor] | None:
    """A module in evaluation mode, inputs to outputs without gradients, where the kernels have a faster form of it.

    It computes with the module's parameters and buffers as they are at each call.
    """
    if compute is None or not ConvMixerForm.fits(module, compute, sample) or has_hooks(module):
        return None
    form = ConvMixerForm(module, compute)
    parameters = {name: parameter.detach()[None] for name, parameter in module.named_parameters()}
    buffers = {name: buffer[None] for name, buffer in module.named_buffers()}
    return lambda inputs: form.evaluate(parameters, buffers, inputs[None])[0]
