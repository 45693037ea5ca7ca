"""The private APIs of torch that fedlalr uses. No other module may use one.

`tests/training/test_torch_internals.py` names the torch version these were checked with. It fails if one is missing or
has changed its signature, and if another module uses a private API. When a new torch breaks something, fix it here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fedlalr.algorithms.slots import Slots

# The names that are only imported here, for other modules.
__all__ = ["BatchNorm", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

convolution_backward = torch.ops.aten.convolution_backward
sigmoid_backward = torch.ops.aten.sigmoid_backward
tanh_backward = torch.ops.aten.tanh_backward
threshold_backward = torch.ops.aten.threshold_backward

_LATE = torch.tensor(torch.inf, device="cpu")
"""A step so late that Adam's bias corrections are exactly 1."""


@contextmanager
def without_fallback_warnings() -> Iterator[None]:
    """Stop vmap from warning about operations without a batching rule: the caller did not choose vmap."""
    show = getattr(torch._C._functorch, "_set_vmap_fallback_warning_enabled")  # noqa: B009 - torch's stubs lack it
    show(False)
    try:
        yield
    finally:
        show(True)


class DispatchMode(TorchDispatchMode):
    """A `TorchDispatchMode` that does not import torch's compiler, which takes over a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def adam_(client: Slots, gradient: Tensor, betas: tuple[float, float], lr: float, eps: float) -> None:
    """m ← β1 m + (1 − β1) g,  v ← β2 v + (1 − β2) g²,  v̂ ← max(v̂, v),  x ← x − α m / (√v̂ + ε)

    With v for v̂ if the client has none. In one pass over CPU tensors, by the operator behind
    `torch.optim.Adam(fused=True)`.
    """
    largest = [client.v_hat] if "v_hat" in client else []
    torch._fused_adam_(
        [client.x], [gradient], [client.m], [client.v], largest, [_LATE], lr=lr, beta1=betas[0], beta2=betas[1],
        weight_decay=0.0, eps=eps, amsgrad=bool(largest), maximize=False,
    )  # fmt: skip


def add_to_each(tensors: Sequence[Tensor], value: float) -> Sequence[Tensor]:
    """`tensor + value` for each tensor, in one kernel launch on a GPU."""
    return torch._foreach_add(list(tensors), value) if tensors else ()


def has_hooks(model: nn.Module) -> bool:
    """Whether any module of a model has a hook that sees or changes what passes through it."""
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks for module in model.modules()
    )


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of a model that its state dict has."""
    left_out = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in left_out}


def storage_address(storage: torch.UntypedStorage) -> int:
    """An address that identifies a storage while it is alive."""
    return int(storage._cdata)


def write_counts(slots: Slots) -> list[int]:
    """How often each slot, or what it is a view of, was written in place."""
    return [slot._version for slot in slots.values()]
