"""Products of few rows with a large matrix for each client, in float32: see `narrow_triton`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlalr.training.kernels import float32_products
from fedlalr.training.kernels.narrow_triton import narrow_input_gradient, narrow_product, narrow_weight_gradient

# Outputs and columns per block, and launch options, tuned on an H200.
FORWARD = {"OUTPUTS": 64, "COLUMNS": 64, "num_warps": 4, "num_stages": 3}
INPUT_GRADIENT = {"OUTPUTS": 32, "COLUMNS": 128, "num_warps": 4, "num_stages": 2}
WEIGHT_GRADIENT = {"OUTPUTS": 32, "COLUMNS": 256, "num_warps": 4, "num_stages": 2}
PROGRAMS = 512
"""The number of programs that keeps a large GPU busy; the columns of a product are split among them."""
ROWS = 16
"""Rows up to which these kernels are faster than the library's; fewer are padded."""
LARGE_MATRIX = 1 << 16
"""Numbers of a client's matrix from which reading it bounds the product."""


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels are for such a product: few rows in float32, matrices that lie row by row."""
    return (
        x.dtype == weight.dtype == torch.float32
        and x.shape[1] <= ROWS
        and weight.stride()[1:] == (weight.shape[2], 1)
        and weight[0].numel() >= LARGE_MATRIX
    )


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weightᵀ`."""
    x, (clients, rows, columns), outputs = x.contiguous(), x.shape, weight.shape[1]
    blocks = -(-outputs // FORWARD["OUTPUTS"])
    parts = max(1, min(PROGRAMS // (blocks * clients), columns // 512))
    share = -(-columns // (parts * FORWARD["COLUMNS"])) * FORWARD["COLUMNS"]
    out = x.new_empty(parts, clients, rows, outputs)
    narrow_product[(blocks, parts * clients)](
        x, weight, out, weight.stride(0), clients, rows, outputs, columns,
        ROWS=ROWS, SHARE=share, PRECISION=precision(), **FORWARD,
    )  # fmt: skip
    return out[0] if parts == 1 else out.sum(0)


def input_gradient(slope: Tensor, weight: Tensor) -> Tensor:
    """`slope @ weight`."""
    slope, (clients, rows, outputs), columns = slope.contiguous(), slope.shape, weight.shape[2]
    out = slope.new_empty(clients, rows, columns)
    narrow_input_gradient[(-(-columns // INPUT_GRADIENT["COLUMNS"]), clients)](
        slope, weight, out, weight.stride(0), rows, outputs, columns, ROWS=ROWS, PRECISION=precision(), **INPUT_GRADIENT
    )
    return out


def weight_gradient(slope: Tensor, x: Tensor, out: Tensor) -> Tensor:
    """`slopeᵀ @ x`, written into `out` `[C, O, K]`, whose matrices lie row by row."""
    slope, x, (clients, rows, outputs), columns = slope.contiguous(), x.contiguous(), slope.shape, x.shape[2]
    narrow_weight_gradient[(-(-columns // WEIGHT_GRADIENT["COLUMNS"]), clients)](
        x, slope, out, out.stride(0), rows, outputs, columns, ROWS=ROWS, PRECISION=precision(), **WEIGHT_GRADIENT
    )
    return out


def precision() -> str:
    """How float32 is multiplied, according to torch's setting for matrix products."""
    return float32_products(torch.backends.cuda.matmul.allow_tf32)
