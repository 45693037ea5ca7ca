"""Attention over a stack of clients.

Under vmap, torch cannot see that a tensor requires a gradient, so it may choose an attention kernel without one. Here
the clients are folded into the batch, and torch chooses among all its kernels as for one model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedlalr.training.stacked.grouped_layers import Batched, stacked
from fedlalr.training.stacked.no_dropout import NoDropout


class FoldedAttention(Batched):
    """Scaled dot-product attention with the clients folded into the batch."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, options: Any
    ) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, **options)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
        causal: bool,
        options: Any,
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        queries, keys, values = (
            stacked(tensor, dim, clients) for tensor, dim in zip((query, key, value), in_dims[:3], strict=True)
        )
        if mask is not None:
            mask = _folded_mask(stacked(mask, in_dims[3], clients), queries)
        output = F.scaled_dot_product_attention(
            _folded(queries), _folded(keys), _folded(values), mask, dropout, causal, **options
        )
        return output.view(*queries.shape[:-1], output.shape[-1]), 0


def _folded(tensor: Tensor) -> Tensor:
    """A tensor `[C, B, …]` as `[C · B, …]`; without a batch, the clients are one."""
    return tensor.flatten(0, 1) if tensor.dim() > 3 else tensor


def _folded_mask(mask: Tensor, query: Tensor) -> Tensor:
    """A mask `[C, …]` of any rank that broadcasts to a client's scores, for a folded query."""
    mask = mask.view(len(mask), *(1,) * (query.dim() - mask.dim()), *mask.shape[1:])
    return _folded(mask.expand(-1, query.shape[1], *mask.shape[2:]) if query.dim() > 3 else mask)


class FoldAttention(TorchFunctionMode):
    """Replaces torch's attention, which modules call as a function, by `FoldedAttention`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _fold(*args, **(kwargs or {}))


def _fold(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    apply: Callable[..., Tensor] = FoldedAttention.apply
    return apply(query, key, value, attn_mask, 0.0 if NoDropout.active else dropout_p, is_causal, options)
