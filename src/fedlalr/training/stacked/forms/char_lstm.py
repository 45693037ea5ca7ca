"""CharLSTM over a stack of clients: one product for all input projections of a layer, then the recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedlalr.models.lstm import CharLSTM
from fedlalr.training.interfaces import Buffers, Tensors
from fedlalr.training.kernels import plain, precision_fits


class CharLSTMForm:
    """A `StackedForward` of `CharLSTM`. It has no buffers and does not mix samples, so a mask changes nothing."""

    def __init__(self, module: Any, compute: torch.dtype | None) -> None:
        """Of a module that `fits`."""
        self.layers, self.hidden = module.lstm.num_layers, module.lstm.hidden_size
        self.compute = compute

    @staticmethod
    def fits(module: nn.Module, compute: torch.dtype | None, sample: torch.Size) -> bool:
        """Whether the module is a CharLSTM of stock layers whose size the kernels, if requested, support."""
        if type(module) is not CharLSTM or len(sample) != 1 or not precision_fits(module, compute):
            return False
        if module.embedding.padding_idx is not None or module.embedding.max_norm is not None:
            return False
        if compute is None:
            return True
        from fedlalr.training.kernels.recurrence import supported

        return supported(module.lstm.hidden_size, module.head.weight.device)

    def __call__(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Buffers]:
        characters = inputs.transpose(1, 2).contiguous()  # time before batch: what one step needs is contiguous
        run = self._plain if self.compute is None else self._fast
        weight, bias = parameters["head.weight"], parameters["head.bias"]
        with torch.autocast(inputs.device.type, enabled=False):  # the operations choose their own precision
            last = run(parameters, parameters["embedding.weight"], characters)
            logits = torch.baddbmm(bias[:, None, :], last.to(weight.dtype), weight.transpose(1, 2))
        return logits, dict(buffers)

    def _plain(self, parameters: Tensors, table: Tensor, characters: Tensor) -> Tensor:
        x = plain.embed(table, characters)
        for layer in range(self.layers):
            x = plain.lstm_layer(x, *self._gates(parameters, layer))
        return x[:, -1]

    def _fast(self, parameters: Tensors, table: Tensor, characters: Tensor) -> Tensor:
        from fedlalr.training.kernels import recurrence  # Triton is not installed everywhere

        x = recurrence.embed(F.pad(table, (0, -table.shape[-1] % 8)), characters)
        extra = recurrence.padded(self.hidden) - self.hidden
        for layer in range(self.layers):
            w_ih, w_hh, bias = self._gates(parameters, layer)
            w_ih = F.pad(w_ih, (0, x.shape[-1] - w_ih.shape[-1], 0, extra))
            x = recurrence.lstm_layer(x, w_ih, F.pad(w_hh, (0, extra, 0, extra)), F.pad(bias, (0, extra)))
        return x[:, -1, :, : self.hidden]

    def _gates(self, parameters: Tensors, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """A layer's parameters with a separate dimension for the four gates."""
        w_ih, w_hh, b_ih, b_hh = (
            torch.unflatten(parameters[f"lstm.{name}_l{layer}"], 1, (4, self.hidden))
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        return w_ih, w_hh, b_ih + b_hh
