"""The paper's networks written for a stack of clients: the same parameters and results, faster than under vmap.

`stacked_form(module, compute, sample)` gives one where there is one. A form runs either in plain PyTorch, in the
parameters' own precision, or (asked for bfloat16, on a GPU with Triton) through the kernels of
`fedlalr.training.kernels`.
"""

from __future__ import annotations

import torch
from torch import nn

from fedlalr.training.stacked_forms.char_lstm import CharLSTMForm
from fedlalr.training.stacked_forms.convmixer import ConvMixerForm
from fedlalr.training.stacked_forms.form import StackedForward

__all__ = ["StackedForward", "stacked_form"]


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
