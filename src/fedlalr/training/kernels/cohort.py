"""The server's passes over a cohort's replies on a GPU: one each, where plain PyTorch needs several."""

from __future__ import annotations

import torch
from torch import Tensor

from fedlalr.training.kernels import kernels_available

LARGE = 1 << 16
"""The number of elements from which a kernel pays off."""
SPAN, BLOCK = 16384, 1024


def fits(values: Tensor, reference: Tensor | None) -> bool:
    """Whether the kernels support these replies `[R, P]` and this broadcast `[P]`."""
    return (
        values.dim() == 2
        and values.numel() >= LARGE
        and values.dtype == torch.float32
        and values.stride(1) == 1
        and (reference is None or (reference.is_contiguous() and reference.dtype == values.dtype))
        and kernels_available(values.device)
    )


def changes(values: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of each row's change, float64 `[R]`, and whether any element fell below the reference, bool `[R]`."""
    from fedlalr.training.kernels.cohort_triton import measure_changes  # Triton is not installed everywhere

    rows, size = values.shape
    blocks = -(-size // SPAN)
    squares = torch.empty(rows, blocks, device=values.device, dtype=torch.float64)
    fell = torch.empty(rows, blocks, device=values.device, dtype=torch.int32)
    measure_changes[(blocks, rows)](
        values, reference, squares, fell, values.stride(0), size, blocks, SPAN=SPAN, BLOCK=BLOCK
    )
    return squares.sum(1).sqrt(), fell.any(1)


def mean_change(values: Tensor, reference: Tensor, share: Tensor) -> Tensor:
    """b + Σ wᵢ (uᵢ − b)."""
    from fedlalr.training.kernels.cohort_triton import weighted_change

    rows, size = values.shape
    out = torch.empty_like(reference)
    weighted_change[(-(-size // BLOCK),)](
        values, reference, share.contiguous(), out, values.stride(0), size, ROWS=rows, BLOCK=BLOCK
    )
    return out
