"""Fused local steps: clipping, weight decay and the algorithm's step in few passes over memory, in place.

`FUSED_STEPS` lists the steps with fused forms, one for CPUs and one as a Triton kernel. Any other step runs through
`local_step`, whose result every form reproduces. To add one, write both forms and a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fedlalr.algorithms.alignedlalr import AlignedLALR
from fedlalr.algorithms.bias_correction import corrected_rate
from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.fedlalr import FedLALR
from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.slots import Algorithm, Context, Slots
from fedlalr.training.clipping import Regularisation, clip_factor
from fedlalr.training.kernels import kernels_available
from fedlalr.training.torch_internals import amsgrad_

BLOCK = 1024
"""Numbers that one Triton program updates."""


class FusedStep(Protocol):
    """Does the same as `local_step`, but writes the new values into the client's slots `[C, P]`.

    Each slot must be contiguous and share no memory with another. The gradient may be overwritten. A kernel never
    synchronises with the host, so it can be captured in a CUDA graph; the numbers of the context are tensors then, so
    that each replay sees their current values.
    """

    def __call__(
        self,
        client: Slots,
        gradient: Tensor,
        broadcast: Slots,
        context: Context,
        regularisation: Regularisation,
        active: Tensor | None = None,
    ) -> None:
        """One step of every client, or of those that `active` (bool `[C]`) marks."""


class Forms(NamedTuple):
    """Factories of an algorithm's fused step: for a CPU, and as a Triton kernel."""

    cpu: Callable[[Algorithm], FusedStep]
    triton: Callable[[Algorithm], FusedStep]


def fused_forms(algorithm: Algorithm) -> Forms | None:
    """The fused forms of an algorithm's step, or None. Without alignment, AlignedLALR's step is FedLALR's."""
    forms = FUSED_STEPS.get(type(algorithm).step)
    return AMSGRAD if forms is ALIGNED and not cast(AlignedLALR, algorithm).align else forms


def fused_step(algorithm: Algorithm, device: torch.device | str, dtype: torch.dtype) -> FusedStep | None:
    """The fused form of an algorithm's local step, or None if there is none; use `local_step` then."""
    forms = fused_forms(algorithm)
    if forms is None:
        return None
    if dtype == torch.float32 and kernels_available(device):
        return forms.triton(algorithm)
    return forms.cpu(algorithm) if torch.device(device).type == "cpu" else None


@dataclass(frozen=True)
class CPUStep:
    """A `FusedStep` on a CPU: `update` writes into the client's slots."""

    update: Callable[[Any, Slots, Tensor, Slots, Context], object]
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

    slots: tuple[str, ...]
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

        x, tensors = client.x, [gradient.contiguous(), *(client[name] for name in self.slots)]
        if any(not tensor.is_contiguous() or tensor.shape != x.shape for tensor in tensors):
            raise ValueError("the fused step writes in place, so every slot must be a separate contiguous stack [C, P]")
        amsgrad = len(self.slots) > 1
        lr, eps = _amsgrad_rate(self.algorithm, context) if amsgrad else (context.lr, 0.0)
        aligned = fused_forms(self.algorithm) is ALIGNED
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


def _sgd_cpu(algorithm: Algorithm, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> None:
    client.x.sub_(gradient, alpha=float(context.lr))


def _amsgrad_cpu(
    algorithm: FedLALR | AlignedLALR, client: Slots, gradient: Tensor, broadcast: Slots, context: Context
) -> None:
    lr, eps = _amsgrad_rate(algorithm, context)
    amsgrad_(client, gradient, float(lr), algorithm.betas, eps)


def _aligned_cpu(algorithm: AlignedLALR, client: Slots, gradient: Tensor, broadcast: Slots, context: Context) -> None:
    _amsgrad_cpu(algorithm, client, gradient, broadcast, context)
    client.x.add_(algorithm.align / context.steps * broadcast.d)


SGD = Forms(cpu=partial(CPUStep, _sgd_cpu), triton=partial(TritonStep, ("x",)))
AMSGRAD = Forms(cpu=partial(CPUStep, _amsgrad_cpu), triton=partial(TritonStep, ("x", "m", "v", "v_hat")))
ALIGNED = Forms(cpu=partial(CPUStep, _aligned_cpu), triton=partial(TritonStep, ("x", "m", "v", "v_hat")))
FUSED_STEPS: dict[Callable[..., Slots], Forms] = {
    FedAvg.step: SGD,
    LocalSGD.step: SGD,
    FedLALR.step: AMSGRAD,
    AlignedLALR.step: ALIGNED,
}
"""An algorithm's `step` → its fused forms. A subclass that overrides `step` has none."""
