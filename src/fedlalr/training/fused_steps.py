"""Fused local steps: clipping, weight decay and the algorithm's step in few passes over memory, in place.

`FUSED_STEPS` lists the steps with a fused form, which exists for CPUs and as a Triton kernel. Any other step runs
through `local_step`, whose result both reproduce. To add one, write its update for CPUs, extend the kernel, and add a
row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fedlalr.algorithms.alignedlalr import AlignedLALR
from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.fedlalr import FedLALR
from fedlalr.algorithms.server_optimizers import corrected_rate
from fedlalr.algorithms.slots import Algorithm, Context, Slots
from fedlalr.training.clipping import Regularisation, clip_factor
from fedlalr.training.kernels import kernels_available
from fedlalr.training.torch_internals import amsgrad_

BLOCK = 1024
"""Numbers that one Triton program updates."""


Update = Callable[[Any, Slots, Tensor, Slots, Context], None]
"""An algorithm's step on a CPU, from the same arguments; writes into the client's slots."""


@dataclass(frozen=True)
class CPUStep:
    """A `FusedStep` on a CPU."""

    update: Update
    algorithm: Algorithm

    def __call__(
        self,
        client: Slots,
        gradient: Tensor,
        broadcast: Slots,
        context: Context,
        regularisation: Regularisation,
        active: Tensor | None = None,
    ) -> None:
        old = Slots() if active is None else client.map(Tensor.clone)
        regularisation.apply_(gradient, client.x, float(context.lr))
        self.update(self.algorithm, client, gradient, broadcast, context)
        for name, slot in old.items():
            client[name].copy_(torch.where(cast(Tensor, active)[:, None], client[name], slot))


@dataclass(frozen=True)
class TritonStep:
    """A `FusedStep` as one Triton kernel, which updates x alone (SGD) or x, m, v and v̂ (AMSGrad, also aligned)."""

    update: Update
    algorithm: Any

    def __call__(
        self,
        client: Slots,
        gradient: Tensor,
        broadcast: Slots,
        context: Context,
        regularisation: Regularisation,
        active: Tensor | None = None,
    ) -> None:
        from fedlalr.training.kernels.steps_triton import step  # Triton is not installed everywhere

        amsgrad, aligned = self.update is not sgd, self.update is aligned_amsgrad
        slots = ("x", "m", "v", "v_hat") if amsgrad else ("x",)
        x, tensors = client.x, [gradient.contiguous(), *(client[name] for name in slots)]
        if any(not tensor.is_contiguous() or tensor.shape != x.shape for tensor in tensors):
            raise ValueError("the fused step writes in place, so every slot must be a separate contiguous stack [C, P]")
        lr, eps = _amsgrad_rate(self.algorithm, context) if amsgrad else (context.lr, 0.0)
        share = _on(x, self.algorithm.align / context.steps).expand(len(x), 1).contiguous() if aligned else None
        clip_norm = regularisation.clip_norm
        factor = None if clip_norm is None else clip_factor(gradient, clip_norm).squeeze(-1)
        step[(-(-x.numel() // BLOCK),)](
            *tensors, *() if amsgrad else (None, None, None), _on(x, lr), _on(x, context.lr), factor, active,
            regularisation.decayed, broadcast.d if aligned else None, share, x.numel(), x.shape[-1],
            regularisation.weight_decay, regularisation.decoupled_weight_decay,
            *self.algorithm.betas if amsgrad else (0.0, 0.0), eps,
            CLIPPED=factor is not None, GUARDED=active is not None, MASKED=regularisation.decayed is not None,
            AMSGRAD=amsgrad, ALIGNED=aligned, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


FusedStep = CPUStep | TritonStep
"""Does the same as `local_step`, but writes the new values into the client's slots `[C, P]`: of every client, or of
those that `active` (bool `[C]`) marks.

Each slot must be contiguous and share no memory with another. The gradient may be overwritten. The kernel never
synchronises with the host, so it can be captured in a CUDA graph; the numbers of the context are tensors then, so that
each replay sees their current values.
"""


def _on(x: Tensor, number: float | Tensor) -> Tensor:
    """A number as a tensor on the device of x, without waiting for the device."""
    if isinstance(number, Tensor):
        return number.to(x.dtype)
    return torch.full((), number, device=x.device, dtype=x.dtype)


def _amsgrad_rate(algorithm: FedLALR | AlignedLALR, context: Context) -> tuple[float | Tensor, float]:
    """The rate of a step and the ε beside its root."""
    if not algorithm.bias_correction:
        return context.lr, 0.0
    return corrected_rate(context.lr, algorithm.betas, context.step), algorithm.eps


def sgd(algorithm: Algorithm, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> None:
    client.x.sub_(gradient, alpha=float(context.lr))


def amsgrad(
    algorithm: FedLALR | AlignedLALR, client: Slots, gradient: Tensor, broadcast: Slots, context: Context
) -> None:
    lr, eps = _amsgrad_rate(algorithm, context)
    amsgrad_(client, gradient, float(lr), algorithm.betas, eps)


def aligned_amsgrad(
    algorithm: AlignedLALR, client: Slots, gradient: Tensor, broadcast: Slots, context: Context
) -> None:
    amsgrad(algorithm, client, gradient, broadcast, context)
    client.x.add_(algorithm.align / context.steps * broadcast.d)


FUSED_STEPS: dict[Callable[..., Slots], Update] = {
    FedAvg.step: sgd,
    FedLALR.step: amsgrad,
    AlignedLALR.step: aligned_amsgrad,
}
"""An algorithm's `step` → its update. A subclass that overrides `step` has none."""


def fused_update(algorithm: Algorithm) -> Update | None:
    """The update of an algorithm with a fused step, or None. Without alignment, AlignedLALR's step is FedLALR's."""
    update = FUSED_STEPS.get(type(algorithm).step)
    return amsgrad if update is aligned_amsgrad and not cast(AlignedLALR, algorithm).align else update


def fused_step(algorithm: Algorithm, device: torch.device | str, dtype: torch.dtype) -> FusedStep | None:
    """The fused form of an algorithm's local step, or None if there is none; use `local_step` then."""
    update = fused_update(algorithm)
    if update is None:
        return None
    if dtype == torch.float32 and kernels_available(device):
        return TritonStep(update, algorithm)
    return CPUStep(update, algorithm) if torch.device(device).type == "cpu" else None
