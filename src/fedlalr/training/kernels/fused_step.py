"""A local step with everything around it in one pass over the stack, for the algorithms that have a kernel."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.fedlalr import FedLALR
from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.slots import Algorithm, Slots
from fedlalr.training.clipping import clip_factor
from fedlalr.training.kernels import kernels_available

BLOCK = 1024


class FusedStep(Protocol):
    """Does what `local_step` does, but writes the new values into the client's own slots `[C, P]`.

    The slots must be contiguous and no two of them may share memory. Nothing is read back to the host, so the call can
    be captured in a CUDA graph; then `lr` should be a tensor, which the next replay may find changed.
    """

    def __call__(
        self,
        client: Slots,
        gradient: Tensor,
        lr: float | Tensor,
        *,
        clip_norm: float | None = None,
        weight_decay: float = 0.0,
        decoupled_weight_decay: float = 0.0,
        active: Tensor | None = None,
    ) -> None:
        """One step of every client, or of those that `active` (bool `[C]`) marks."""
        ...


def fused_step(algorithm: Algorithm, device: torch.device | str) -> FusedStep | None:
    """The fused form of an algorithm's local step on a device, or None where there is none and `step` is to be used."""
    if not kernels_available(device):
        return None
    from fedlalr.training.kernels.steps_triton import amsgrad, sgd  # Triton is not installed everywhere

    step = type(algorithm).step
    if isinstance(algorithm, FedLALR) and step is FedLALR.step:
        return KernelStep(amsgrad, ("x", "m", "v", "v_hat"), algorithm.betas)
    if step in (FedAvg.step, LocalSGD.step):
        return KernelStep(sgd, ("x",))
    return None


class KernelStep:
    """A `FusedStep` by a Triton kernel over some slots and constants."""

    def __init__(self, kernel: Any, slots: tuple[str, ...], constants: tuple[float, ...] = ()) -> None:
        self.kernel, self.slots, self.constants = kernel, slots, constants

    def __call__(
        self,
        client: Slots,
        gradient: Tensor,
        lr: float | Tensor,
        *,
        clip_norm: float | None = None,
        weight_decay: float = 0.0,
        decoupled_weight_decay: float = 0.0,
        active: Tensor | None = None,
    ) -> None:
        x = client.x
        tensors = [gradient.contiguous(), *(client[name] for name in self.slots)]
        if any(not tensor.is_contiguous() or tensor.shape != x.shape for tensor in tensors):
            raise ValueError(
                "the fused step writes in place and needs every slot as a contiguous stack [C, P] of its own"
            )
        rate = torch.full((), lr, device=x.device, dtype=x.dtype) if isinstance(lr, float | int) else lr.to(x.dtype)
        factor = None
        if clip_norm is not None:
            factor = clip_factor(gradient, clip_norm).squeeze(-1)
        self.kernel[(-(-x.numel() // BLOCK),)](
            *tensors, rate, factor, active, x.numel(), x.shape[-1], weight_decay, decoupled_weight_decay,
            *self.constants, SCALED=factor is not None, GUARDED=active is not None, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
