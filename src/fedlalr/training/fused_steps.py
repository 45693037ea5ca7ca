"""Local steps that write into the client's own slots: the same arithmetic in fewer passes over memory.

For networks so small that the update outweighs the gradient. An algorithm that is not here takes its own `step`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.fedlalr import FedLALR
from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.slots import Algorithm, Slots
from fedlalr.training.clipping import clip_factor
from fedlalr.training.kernels.fused_step import FusedStep, fused_step


def in_place_step(algorithm: Algorithm, device: torch.device, dtype: torch.dtype) -> FusedStep | None:
    """The fastest in-place form of an algorithm's local step, or None where `local_step` is to be used."""
    kernel = fused_step(algorithm, device) if dtype == torch.float32 else None
    if kernel is not None:
        return kernel
    step = type(algorithm).step
    if step in (FedAvg.step, LocalSGD.step):
        return SGDStep()
    if isinstance(algorithm, FedLALR) and step is FedLALR.step:
        return AMSGradStep(algorithm.betas)
    return None


class InPlaceStep:
    """Clipping and weight decay as in `local_step`, then the update. The gradient's memory is used up."""

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
        """One step of every client; `active` is for the kernels alone."""
        if active is not None:
            raise ValueError("this form of the step takes every client of the stack")
        if clip_norm is not None:
            gradient.mul_(clip_factor(gradient, clip_norm))
        if weight_decay:
            gradient.add_(client.x, alpha=weight_decay)
        if decoupled_weight_decay:
            client.x.mul_(1 - lr * decoupled_weight_decay)
        self.update(client, gradient, lr)

    def update(self, client: Slots, gradient: Tensor, lr: float | Tensor) -> None:
        """The algorithm's own part."""
        raise NotImplementedError


class SGDStep(InPlaceStep):
    """x ← x − α g"""

    def update(self, client: Slots, gradient: Tensor, lr: float | Tensor) -> None:
        if isinstance(lr, Tensor):
            client.x.addcmul_(gradient, lr, value=-1)
        else:
            client.x.sub_(gradient, alpha=lr)


class AMSGradStep(InPlaceStep):
    """m ← β1 m + (1 − β1) g,  v ← β2 v + (1 − β2) g²,  v̂ ← max(v̂, v),  x ← x − α m / √v̂

    On a CPU torch's own fused Adam does that in one pass: its corrections for the first steps vanish for a step that is
    infinitely late.
    """

    def __init__(self, betas: tuple[float, float]) -> None:
        self.betas = betas
        self._late = torch.tensor(torch.inf, device="cpu")

    def update(self, client: Slots, gradient: Tensor, lr: float | Tensor) -> None:
        if gradient.device.type == "cpu" and not isinstance(lr, Tensor):
            self._fused(client, gradient, lr)
        else:
            self._by_passes(client, gradient, lr)

    def _fused(self, client: Slots, gradient: Tensor, lr: float) -> None:
        beta1, beta2 = self.betas
        torch._fused_adam_(
            [client.x],
            [gradient],
            [client.m],
            [client.v],
            [client.v_hat],
            [self._late],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=0.0,
            eps=0.0,
            amsgrad=True,
            maximize=False,
        )

    def _by_passes(self, client: Slots, gradient: Tensor, lr: float | Tensor) -> None:
        beta1, beta2 = self.betas
        client.m.lerp_(gradient, 1 - beta1)
        client.v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        torch.maximum(client.v_hat, client.v, out=client.v_hat)
        root = torch.sqrt(client.v_hat, out=gradient)
        client.x.sub_(torch.div(client.m, root, out=root).mul_(lr))
