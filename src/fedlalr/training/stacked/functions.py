"""The functions that transformers are made of, with rules of their own for vmap over clients.

While `BatchedFunctions` is active inside vmap, calls of `F.linear`, `F.scaled_dot_product_attention` and the others in
`BATCHED` take the fast route for a stack of clients, whoever calls them: stock layers, Hugging Face models or the
caller's own module. A layer that all clients share, such as a frozen one, sees the batches of all clients as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedlalr.training.kernels import kernels_available
from fedlalr.training.kernels.products import column_sums, product_float32
from fedlalr.training.stacked.flat_gradient import FlatGradient
from fedlalr.training.stacked.grouped_layers import Batched, Dims, stacked
from fedlalr.training.stacked.no_dropout import NoDropout

ALIGNED = 8
"""Numbers in half precision that fill 16 bytes."""
LARGE = 10**9
"""Multiplications of one client from which a product for each client, which adds the bias for free, is faster on a GPU
than one product for all and a pass for the biases."""


class BatchedFunctions(TorchFunctionMode):
    """Replaces torch's functions by those of a table. Use it inside vmap only."""

    def __init__(self, table: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
        super().__init__()
        self._table = table

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._table.get(func, func)(*args, **(kwargs or {}))


def batched_functions(fast: bool = True) -> BatchedFunctions:
    """The mode: with all functions if `fast`, else only with those that torch cannot batch safely."""
    return BatchedFunctions(BATCHED if fast else NEEDED)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The precision of a product of this tensor: autocast's, if it is on and the tensor is not float64."""
    kind = tensor.device.type
    narrow = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if narrow else tensor.dtype


class StackedProduct(torch.autograd.Function):
    """`x @ weightᵀ + bias` of each client: rows `[C, N, K]`, weight `[C, O, K]`, bias `[C, O]` or None.

    Operands have the given dtype; gradients of parameters have the parameters' own. In half precision the rows of the
    output are aligned to 16 bytes, without which libraries have only slow kernels for them and for their gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.transposed, ctx.wide, outputs = weight.stride(-1) != 1, weight.dtype, weight.shape[1]
        x, weight = x.to(dtype), weight.to(dtype)
        ctx.save_for_backward(x, weight)
        ctx.narrow = _narrow(x, weight)
        if ctx.narrow is not None:
            ctx.place = FlatGradient.place_of(weight)
            y: Tensor = ctx.narrow.product(x, weight)
            return y if bias is None else y + bias[:, None]
        if extra := -outputs % ALIGNED if dtype.itemsize == 2 else 0:
            weight = F.pad(weight, (0, 0, 0, extra))
            bias = None if bias is None else F.pad(bias, (0, extra))
        if bias is None:
            return torch.bmm(x, weight.mT)[..., :outputs]
        if not x.is_cuda or dtype.itemsize > 2 or x[0].numel() * weight.shape[1] < LARGE:
            return torch.baddbmm(bias.to(dtype)[:, None], x, weight.mT)[..., :outputs]
        y = x.new_empty(*x.shape[:2], weight.shape[1])
        for part in zip(bias.to(dtype), x, weight.mT, y, strict=True):
            torch.addmm(*part[:3], out=part[3])
        return y[..., :outputs]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        slope = slope.to(x.dtype)
        dx = dweight = dbias = None
        if ctx.narrow is not None:
            if ctx.needs_input_grad[0]:
                dx = ctx.narrow.input_gradient(slope, weight)
            if ctx.needs_input_grad[1]:
                out = torch.empty_like(weight) if ctx.place is None else ctx.place
                dweight = ctx.narrow.weight_gradient(slope, x, out)
            return dx, dweight, slope.sum(1) if ctx.needs_input_grad[2] else None, None
        mixed = x.dtype.itemsize == 2 and ctx.wide == torch.float32
        product = product_float32 if mixed else torch.bmm
        if ctx.needs_input_grad[0]:
            odd = slope.shape[2] % ALIGNED if x.dtype.itemsize == 2 else 0  # a sum over all of them would be slow
            whole = slope.shape[2] - odd
            dx = torch.bmm(slope[..., :whole], weight[:, :whole])
            if odd:
                dx.baddbmm_(slope[..., whole:], weight[:, whole:])
        if ctx.needs_input_grad[1]:  # in the layout of the weight, which may be a transposed view
            dweight = product(x.mT, slope).mT if ctx.transposed else product(slope.mT, x)
        if ctx.needs_input_grad[2]:
            dbias = column_sums(slope) if mixed else slope.sum(1, dtype=ctx.wide)
        return dx, dweight, dbias, None


def _narrow(x: Tensor, weight: Tensor) -> ModuleType | None:
    """The kernels for products of few rows, if they are for this one."""
    if not kernels_available(x.device):
        return None
    from fedlalr.training.kernels import narrow  # Triton is not installed everywhere

    return narrow if narrow.fits(x, weight) else None


class BatchedLinear(Batched):
    """`F.linear`."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    @staticmethod
    def vmap(info: Any, in_dims: Dims, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, int]:
        x, dtype = stacked(input, in_dims[0], info.batch_size), compute_dtype(input)
        if in_dims[1] is None and in_dims[2] is None:  # one model for all clients: one long batch
            if dtype.itemsize > 2 or len(weight) % ALIGNED == 0:
                return F.linear(x, weight, bias), 0
            rows, weight, bias = x.reshape(1, -1, x.shape[-1]), weight[None], None if bias is None else bias[None]
        else:
            rows, weight = x.reshape(len(x), -1, x.shape[-1]), stacked(weight, in_dims[1], len(x))
            bias = None if bias is None else stacked(bias, in_dims[2], len(x))
        return StackedProduct.apply(rows, weight, bias, dtype).view(*x.shape[:-1], -1), 0


class BatchedNorm(Batched):
    """`F.layer_norm` and, unless `centred`, `F.rms_norm`. On a GPU the output has the precision of the next product."""

    @staticmethod
    def forward(
        input: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: Any, centred: bool
    ) -> Tensor:
        return F.layer_norm(input, shape, weight, bias, eps) if centred else F.rms_norm(input, shape, weight, eps)

    @staticmethod
    def vmap(
        info: Any, in_dims: Dims, input: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None,
        eps: float | None, centred: bool,
    ) -> tuple[Tensor, int]:  # fmt: skip
        clients, x = info.batch_size, stacked(input, in_dims[0], info.batch_size)
        scale, shift = (
            None if part is None else part[None] if dim is None else part.movedim(dim, 0)
            for part, dim in ((weight, in_dims[2]), (bias, in_dims[3]))
        )
        if len(shape) == 1 and x.dtype != torch.float64 and kernels_available(x.device):
            from fedlalr.training.kernels.layer_norm import WIDEST, StackedNorm  # Triton is not installed everywhere

            if shape[0] <= WIDEST:
                eps = torch.finfo(x.dtype).eps if eps is None else eps
                rows = x.reshape(clients, -1, shape[0])
                return StackedNorm.apply(rows, scale, shift, eps, centred, compute_dtype(x)).view(x.shape), 0
        y = BatchedNorm.forward(x, shape, None, None, eps, centred)
        between = x.dim() - len(shape) - 1
        for part, combine in ((scale, torch.mul), (shift, torch.add)):
            if part is not None:
                y = combine(y, part.view(len(part), *[1] * between, *shape))
        return y, 0


class BatchedAttention(Batched):
    """`F.scaled_dot_product_attention`: clients × batch as one batch.

    Under vmap, torch cannot see that a tensor requires a gradient, so it may choose a kernel without one. Of one batch
    it chooses among all its kernels, as for one model.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    @staticmethod
    def vmap(
        info: Any, in_dims: Dims, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, int]:
        clients = info.batch_size
        q, k, v = (stacked(part, dim, clients) for part, dim in zip((q, k, v), in_dims, strict=False))
        if mask is not None and (in_dims[3] is not None or mask.dim() > 2):
            mask = stacked(mask, in_dims[3], clients)
            mask = mask.view(clients, *[1] * (q.dim() - mask.dim()), *mask.shape[1:])
            mask = mask.expand(*q.shape[:2], *mask.shape[2:]).flatten(0, 1)
        output = BatchedAttention.forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), mask, options)
        return output.view(*q.shape[:2], *output.shape[1:]), 0


class BatchedCrossEntropy(Batched):
    """`F.cross_entropy` for class indices, as the mean over all positions of a client."""

    @staticmethod
    def forward(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        return F.cross_entropy(logits, targets, ignore_index=ignored)

    @staticmethod
    def vmap(info: Any, in_dims: Dims, logits: Tensor, targets: Tensor, ignored: int) -> tuple[Tensor, int]:
        clients = info.batch_size
        logits = stacked(logits, in_dims[0], clients).movedim(2, -1)  # the classes are often innermost in memory
        targets = stacked(targets, in_dims[1], clients).reshape(clients, -1)
        rows = logits.reshape(-1, logits.shape[-1])
        if rows.dtype != torch.float64 and kernels_available(rows.device):
            from fedlalr.training.kernels.cross_entropy import rows_cross_entropy  # Triton is not installed everywhere

            each = rows_cross_entropy(rows, targets.flatten(), ignored)
        else:
            each = F.cross_entropy(rows, targets.flatten(), ignore_index=ignored, reduction="none")
        return each.view(clients, -1).sum(1) / (targets != ignored).sum(1), 0


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return BatchedLinear.apply(input, weight, bias) if weight.dim() == 2 else F.linear(input, weight, bias)


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    """The linear layers of GPT-2 on Hugging Face."""
    return torch.addmm(input, mat1, mat2, **options) if options or input.dim() > 1 else linear(mat1, mat2.mT, input)


def layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    return BatchedNorm.apply(input, normalized_shape, weight, bias, eps, True)


def rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return BatchedNorm.apply(input, normalized_shape, weight, None, eps, False)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    options = {"dropout_p": 0.0 if NoDropout.active else dropout_p, "is_causal": is_causal, **options}
    if query.dim() < 3:
        return attention(query[None], key[None], value[None], attn_mask, **options)[0]
    return BatchedAttention.apply(query, key, value, attn_mask, options)


def cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: None = None, ignore_index: int = -100,
    reduce: None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
    old = size_average is not None or reduce is not None
    if old or weight is not None or reduction != "mean" or label_smoothing or not _is_class_index(input, target):
        return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    return BatchedCrossEntropy.apply(input, target, ignore_index)


def _is_class_index(input: Tensor, target: Tensor) -> bool:
    return not target.is_floating_point() and input.dim() == target.dim() + 1 and input.dim() > 1


BATCHED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: linear,
    torch.addmm: addmm,
    F.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    F.scaled_dot_product_attention: attention,
    F.cross_entropy: cross_entropy,
}
"""torch's function → the one for a stack of clients."""
NEEDED = {F.scaled_dot_product_attention: attention}
"""Those without which some models cannot be batched at all."""


class TanhGELU(nn.Module):
    """Stands in for GPT-2's GELU on Hugging Face, which is eight operations there."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


def fused_layer(layer: nn.Module) -> type[nn.Module] | None:
    """The class that stands in for a layer of several operations; None for other layers."""
    is_gelu = type(layer).__name__ == "NewGELUActivation" and type(layer).__module__ == "transformers.activations"
    return TanhGELU if is_gelu else None
