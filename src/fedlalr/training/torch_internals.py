"""Everything private that we use of torch, in one place: no other module may.

`tests/training/test_torch_internals.py` checks that each of these still exists with the signature it had in the torch
version named there. When a new torch breaks one, fix it here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.conv import _ConvNd as ConvNd
from torch.nn.modules.conv import _ConvTransposeNd as ConvTransposeNd
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fedlalr.algorithms.slots import Slots

__all__ = [
    "BatchNorm",
    "ConvNd",
    "ConvTransposeNd",
    "DropoutNd",
    "TorchDispatchMode",
    "add_to_each",
    "amsgrad_",
    "has_hooks",
    "storage_address",
    "tree_leaves",
    "tree_map",
]

_LATE = torch.tensor(torch.inf, device="cpu")
"""A step so late that Adam's bias corrections are exactly 1."""


def amsgrad_(client: Slots, gradient: Tensor, lr: float, betas: tuple[float, float]) -> None:
    """m ← β1 m + (1 − β1) g,  v ← β2 v + (1 − β2) g²,  v̂ ← max(v̂, v),  x ← x − α m / √v̂

    In one pass over CPU tensors, by the operator behind `torch.optim.Adam(fused=True, amsgrad=True)`.
    """
    torch._fused_adam_(
        [client.x], [gradient], [client.m], [client.v], [client.v_hat], [_LATE], lr=lr, beta1=betas[0], beta2=betas[1],
        weight_decay=0.0, eps=0.0, amsgrad=True, maximize=False,
    )  # fmt: skip


def add_to_each(tensors: Sequence[Tensor], value: float) -> Sequence[Tensor]:
    """`tensor + value` of each tensor, in one kernel launch on a GPU."""
    return torch._foreach_add(list(tensors), value) if tensors else ()


def has_hooks(model: nn.Module) -> bool:
    """Whether any module of a model has a hook that sees or changes what passes through it."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks for module in model.modules()
    )


def storage_address(storage: torch.UntypedStorage) -> int:
    """What identifies a storage while it is alive."""
    return int(storage._cdata)
