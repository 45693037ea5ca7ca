"""The stacked LSTM layer and embedding in bfloat16: autograd around the Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedlalr.training.kernels import plain, shared_memory
from fedlalr.training.kernels.lstm_triton import lstm_backward, lstm_forward
from fedlalr.training.kernels.products import product_float32

TILE = 16
"""Sequences per program: the smallest tensor-core block, so that there are as many programs as possible."""

# Launch options, tuned on an H200.
FORWARD = {"num_warps": 16, "num_stages": 1}
BACKWARD = {"num_warps": 8, "num_stages": 1}


def supported(size: int, device: torch.device) -> bool:
    """Whether the recurrent matrices of this hidden size, and what passes between steps, fit on chip."""
    return size <= 128 and 10 * padded(size) ** 2 <= shared_memory(device)


def padded(size: int) -> int:
    """The hidden size that the kernels use: padded to a power of two."""
    return max(16, 1 << (size - 1).bit_length())


class _LstmLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor) -> Tensor:
        clients, steps, batch, _ = x.shape
        size = w_hh.shape[-1]
        half_ih, half_hh = w_ih.to(torch.bfloat16), w_hh.to(torch.bfloat16).contiguous()
        projected = product_float32(x.flatten(1, 2), half_ih.flatten(1, 2).transpose(1, 2))
        hidden = x.new_empty(clients, steps, batch, size)
        cells = torch.empty(clients, steps, batch, size, device=x.device)
        gates = x.new_empty(clients, steps, batch, 4, size)
        lstm_forward[(-(-batch // TILE), clients)](
            projected, half_hh, bias.contiguous(), hidden, cells, gates, steps, batch, SIZE=size, TILE=TILE, **FORWARD
        )
        ctx.save_for_backward(x, half_ih, half_hh, hidden, cells, gates)
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhidden: Tensor) -> tuple[Tensor | None, ...]:
        x, half_ih, half_hh, hidden, cells, gates = ctx.saved_tensors
        clients, steps, batch, size = hidden.shape
        dgates = torch.empty_like(gates)
        lstm_backward[(-(-batch // TILE), clients)](
            dhidden.contiguous(), half_hh, cells, gates, dgates, steps, batch, SIZE=size, TILE=TILE, **BACKWARD
        )
        dgates = dgates.view(clients, steps * batch, 4 * size)
        dx = torch.bmm(dgates, half_ih.flatten(1, 2)).view_as(x) if ctx.needs_input_grad[0] else None
        dw_ih = product_float32(dgates.transpose(1, 2), x.flatten(1, 2)).view(half_ih.shape)
        later, earlier = dgates[:, batch:], hidden.flatten(1, 2)[:, : (steps - 1) * batch]
        dw_hh = product_float32(later.transpose(1, 2), earlier).view(half_hh.shape)
        dbias = dgates.sum(dim=1, dtype=torch.float32).view(clients, 4, size)
        return dx, dw_ih, dw_hh, dbias


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.vocabulary = table.shape[1]
        return plain.embed(table.to(torch.bfloat16), tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        # a product with one-hot columns: no atomics, so the result is deterministic
        symbols = torch.arange(ctx.vocabulary, device=tokens.device)[None, :, None]
        chosen = (tokens.flatten(1)[:, None, :] == symbols).to(torch.bfloat16)
        return product_float32(chosen, dout.flatten(1, -2)), None


def lstm_layer(x: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor) -> Tensor:
    """One LSTM layer from a zero state, time first: `[C, T, B, I]` bfloat16 to `[C, T, B, H]` bfloat16.

    Shapes are those of `plain.lstm_layer`; H must be a `padded` size and I a multiple of eight.
    """
    return _LstmLayer.apply(x, w_ih, w_hh, bias)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """Rows of each client's own table `[C, V, E]` at its tokens `[C, …]`, in bfloat16."""
    return _Embed.apply(table, tokens)
