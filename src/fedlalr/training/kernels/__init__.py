"""Fast kernels for a stack of clients on a GPU, and the same operations in plain PyTorch.

Every operation is defined once and has two forms with the same signature: `plain` runs anywhere in the parameters' own
precision; the Triton form runs on CUDA with bfloat16 activations, float32 arithmetic and float32 gradients of
parameters. `kernels_available` tells whether the second can be used.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import nn

_HAS_TRITON = find_spec("triton") is not None


def kernels_available(device: torch.device | str) -> bool:
    """Whether the Triton kernels can run on a device: CUDA with compute capability 8 or higher, and Triton.

    Under Triton's interpreter (`TRITON_INTERPRET=1`) they also run, slowly, on CPU tensors.
    """
    if not _HAS_TRITON:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    device = torch.device(device)
    return device.type == "cuda" and torch.version.hip is None and _is_recent(device)


def float32_products(tf32: bool) -> str:
    """How Triton multiplies float32: in TF32 or, with float32's precision, as three products in TF32."""
    return "tf32" if tf32 else "tf32x3"


def precision_fits(module: nn.Module, compute: torch.dtype | None) -> bool:
    """Whether a form can run in this precision on the module's device: its own always, bfloat16 by the kernels."""
    if not all(parameter.requires_grad for parameter in module.parameters()):
        return False
    if compute is None:
        return True
    first = next(module.parameters())
    return compute == torch.bfloat16 and first.dtype == torch.float32 and kernels_available(first.device)


@cache
def _is_recent(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def shared_memory(device: torch.device | str) -> int:
    """Bytes of shared memory available to one program on a CUDA device; unlimited under Triton's interpreter."""
    if torch.device(device).type != "cuda":
        return 1 << 30
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", 0))
