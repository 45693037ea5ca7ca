"""Fused local steps: clipping, weight decay and the algorithm's step in few passes over memory, in place.

`FUSED_STEPS` lists the steps with fused forms, one for CPUs and one as a Triton kernel. Any other step runs through
`local_step`, whose result every form reproduces. To add one, write both forms and a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.fedlalr import FedLALR
from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.slots import Algorithm, Slots
from fedlalr.training.clipping import Regularisation, clip_factor
from fedlalr.training.kernels import kernels_available
from fedlalr.training.torch_internals import amsgrad_

BLOCK = 1024
"""Numbers that one Triton program updates."""


class FusedStep(Protocol):
    """Does the same as `local_step`, but writes the new values into the client's slots `[C, P]`.

    Each slot must be contiguous and share no memory with another. The gradient may be overwritten. A kernel never
    synchronises with the host, so it can be captured in a CUDA graph; pass `lr` as a tensor then, so that each replay
    sees its current value.
    """

    def __call__(
        self,
        client: Slots,
        gradient: Tensor,
        lr: float | Tensor,
        regularisation: Regularisation,
        active: Tensor | None = None,
    ) -> None:
        """One step of every client, or of those that `active` (bool `[C]`) marks."""
        ...


class Forms(NamedTuple):
    """Factories of an algorithm's fused step: for a CPU, and as a Triton kernel."""

    cpu: Callable[[Algorithm], FusedStep]
    triton: Callable[[Algorithm], FusedStep]


def fused_step(algorithm: Algorithm, device: torch.device | str, dtype: torch.dtype) -> FusedStep | None:
    """The fused form of an algorithm's local step, or None if there is none; use `local_step` then."""
    forms = FUSED_STEPS.get(type(algorithm).step)
    if forms is None:
        return None
    if dtype == torch.float32 and kernels_available(device):
        return forms.triton(algorithm)
    return forms.cpu(algorithm) if torch.device(device).type == "cpu" else None


@dataclass(frozen=True)
class CPUStep:
    """A `FusedStep` on a CPU: `update(algorithm, client, gradient, lr)` writes into the client's slots."""

    update: Callable[[Any, Slots, Tensor, float], object]
    algorithm: Algorithm

    def __call__(
        self,
        client: Slots,
        gradient: Tensor,
        lr: float | Tensor,
        regularisation: Regularisation,
        active: Tensor | None = None,
    ) -> None:
        if active is None:
            regularisation.apply_(gradient, client.x, float(lr))
            self.update(self.algorithm, client, gradient, float(lr))
            return
        some = client.map(lambda slot: slot[active])
        self(some, gradient[active], lr, regularisation)
        for name, slot in client.items():
            slot[active] = some[name]


@dataclass(frozen=True)
class TritonStep:
    """A `FusedStep` as one Triton kernel, which updates x alone (SGD) or x, m, v and v̂ (AMSGrad)."""

    slots: tuple[str, ...]
    algorithm: Any

    def __call__(
        self,
        client: Slots,
        gradient: Tensor,
        lr: float | Tensor,
        regularisation: Regularisation,
        active: Tensor | None = None,
    ) -> None:
        from fedlalr.training.kernels.steps_triton import step  # Triton is not installed everywhere

        x, tensors = client.x, [gradient.contiguous(), *(client[name] for name in self.slots)]
        if any(not tensor.is_contiguous() or tensor.shape != x.shape for tensor in tensors):
            raise ValueError("the fused step writes in place, so every slot must be a separate contiguous stack [C, P]")
        rate = lr.to(x.dtype) if isinstance(lr, Tensor) else torch.full((), lr, device=x.device, dtype=x.dtype)
        clip_norm = regularisation.clip_norm
        factor = None if clip_norm is None else clip_factor(gradient, clip_norm).squeeze(-1)
        amsgrad = len(self.slots) > 1
        step[(-(-x.numel() // BLOCK),)](
            *tensors, *() if amsgrad else (None, None, None), rate, factor, active, regularisation.decayed,
            x.numel(), x.shape[-1],
            regularisation.weight_decay, regularisation.decoupled_weight_decay,
            *self.algorithm.betas if amsgrad else (0.0, 0.0),
            CLIPPED=factor is not None, GUARDED=active is not None, MASKED=regularisation.decayed is not None,
            AMSGRAD=amsgrad, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


SGD = Forms(
    cpu=partial(CPUStep, lambda algorithm, client, gradient, lr: client.x.sub_(gradient, alpha=lr)),
    triton=partial(TritonStep, ("x",)),
)
AMSGRAD = Forms(
    cpu=partial(CPUStep, lambda algorithm, client, gradient, lr: amsgrad_(client, gradient, lr, algorithm.betas)),
    triton=partial(TritonStep, ("x", "m", "v", "v_hat")),
)
FUSED_STEPS: dict[Callable[..., Slots], Forms] = {
    FedAvg.step: SGD,
    LocalSGD.step: SGD,
    FedLALR.step: AMSGRAD,
}
"""An algorithm's `step` → its fused forms. A subclass that overrides `step` has none."""
