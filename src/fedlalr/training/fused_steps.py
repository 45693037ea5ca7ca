"""Fused local steps: clipping, weight decay and the algorithm's step in few passes over memory, in place.

`FUSED_STEPS` lists the steps with a fused form, which exists for CPUs and as a Triton kernel. Any other step runs
through `local_step`, whose result both reproduce. To add one, write how its rate and ε follow from its options and
counts, and add a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlalr.algorithms.alignedlalr import AlignedLALR
from fedlalr.algorithms.bias_correction import corrected_rate, gathered
from fedlalr.algorithms.diloco import DiLoCo
from fedlalr.algorithms.fedadamw import FedAdamW
from fedlalr.algorithms.fedavg import FedAvg
from fedlalr.algorithms.fedlalr import FedLALR
from fedlalr.algorithms.lafedopt import LAFedOpt
from fedlalr.algorithms.local_sgd import LocalSGD
from fedlalr.algorithms.localadam import LocalAdam
from fedlalr.algorithms.slots import Algorithm, Context, Slots
from fedlalr.training.clipping import Regularisation, clip_factor
from fedlalr.training.kernels import kernels_available
from fedlalr.training.torch_internals import adam_

BLOCK = 1024
"""Numbers that one Triton program updates."""


class Rate(NamedTuple):
    """The numbers of a step x ← x − α m / (√s + ε), each one or a tensor that broadcasts to the stack `[C, P]`."""

    lr: float | Tensor
    eps: float | Tensor


@dataclass(frozen=True)
class FusedUpdate:
    """What a fused step does to x after clipping and weight decay.

    With moments, x ← x − α m / (√s + ε), where s is v̂ if the step has one, and v otherwise. Without, x ← x − α g.
    """

    rate: Callable[[Any, Slots, Slots, Context], Rate] | None = None
    """α and ε from the algorithm, the client's slots, the broadcast and the context, if the step has moments."""
    maximum: bool = False
    """Whether the step has v̂ = max(v̂, v)."""
    uniform: bool = True
    """Whether α and ε are the same for all clients and coordinates."""
    aligned: bool = False
    """Whether the step adds (γ / K) d at the end."""
    counts: bool = False
    """Whether the client's slot n counts its steps."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The model-sized slots that the step writes."""
        if self.rate is None:
            return ("x",)
        return ("x", "m", "v", "v_hat") if self.maximum else ("x", "m", "v")


@dataclass(frozen=True)
class CPUStep:
    """A `FusedStep` on a CPU."""

    update: FusedUpdate
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
        update, old = self.update, Slots() if active is None else client.map(Tensor.clone)
        regularisation.apply_(gradient, client.x, float(context.lr))
        if update.counts:
            client.n.add_(1)
        if update.rate is None:
            client.x.sub_(gradient, alpha=float(context.lr))
        else:
            lr, eps = update.rate(self.algorithm, client, broadcast, context)
            if isinstance(eps, Tensor):
                _adam_each(client, gradient, self.algorithm.betas, lr, eps)
            else:
                adam_(client, gradient, self.algorithm.betas, float(lr), eps)
        if update.aligned:
            client.x.add_(self.algorithm.align / context.steps * broadcast.d)
        if active is not None:
            for name, slot in old.items():
                client[name].copy_(torch.where(active[:, None], client[name], slot))


@dataclass(frozen=True)
class TritonStep:
    """A `FusedStep` as one Triton kernel."""

    update: FusedUpdate
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

        update, x, clip_norm = self.update, client.x, regularisation.clip_norm
        tensors = [gradient.contiguous(), *(client[name] for name in update.slots)]
        if any(not tensor.is_contiguous() or tensor.shape != x.shape for tensor in tensors):
            raise ValueError("the fused step writes in place, so every slot must be a separate contiguous stack [C, P]")
        if update.counts:
            client.n.add_(1 if active is None else active[:, None])
        adaptive, aligned = update.rate is not None, update.aligned
        rate = Rate(context.lr, 0.0) if update.rate is None else update.rate(self.algorithm, client, broadcast, context)
        lr, eps = (part.contiguous() for part in torch.broadcast_tensors(*(_on(x, number) for number in rate)))
        d, share = (broadcast.d, _on(x, self.algorithm.align / context.steps)) if aligned else (None, None)
        factor = None if clip_norm is None else clip_factor(gradient, clip_norm).squeeze(-1)
        step[(-(-x.numel() // BLOCK),)](
            *tensors, *[None] * (5 - len(tensors)), lr, eps, _row(lr), _on(x, context.lr), factor, active,
            regularisation.decayed, d, _row(d), share, _row(share), x.numel(), x.shape[-1],
            regularisation.weight_decay, regularisation.decoupled_weight_decay,
            *self.algorithm.betas if adaptive else (0.0, 0.0),
            CLIPPED=factor is not None, GUARDED=active is not None, MASKED=regularisation.decayed is not None,
            ADAPTIVE=adaptive, MAXIMUM=update.maximum, ALIGNED=aligned, PLACED=lr.dim() > 0 and lr.shape[-1] > 1,
            BLOCK=BLOCK, num_warps=4,
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


def _row(tensor: Tensor | None) -> int:
    """How far apart in memory two clients' numbers are, or 0 if they share them."""
    return 0 if tensor is None or tensor.dim() < 2 else tensor.stride(0)


def _adam_each(client: Slots, gradient: Tensor, betas: tuple[float, float], lr: float | Tensor, eps: Tensor) -> None:
    """`adam_` without v̂, with a rate and an ε for each client or coordinate."""
    client.m.lerp_(gradient, 1 - betas[0])
    client.v.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    client.x.sub_(client.m.mul(lr).div_(client.v.sqrt().add_(eps)))


def _amsgrad(algorithm: FedLALR | AlignedLALR, client: Slots, broadcast: Slots, context: Context) -> Rate:
    if not algorithm.bias_correction:
        return Rate(context.lr, 0.0)
    return Rate(corrected_rate(context.lr, algorithm.betas, context.step), algorithm.eps)


def _corrected(
    algorithm: LAFedOpt | LocalAdam | DiLoCo | FedAdamW,
    lr: float | Tensor,
    first: float | Tensor,
    second: float | Tensor,
) -> Rate:
    """Adam's step, whose m and v have gathered `first` and `second` numbers: α m̂ / (√v̂ + ε) with both multiplied by
    √(1 − β2ᵏ)."""
    root = gathered(algorithm.betas[1], second) ** 0.5
    return Rate(lr * root / gathered(algorithm.betas[0], first), algorithm.eps * root)


def _shared(count: float | Tensor) -> float | Tensor:
    """A count as one number if all coordinates of all clients have the same, which only a CPU can look up at once."""
    if not isinstance(count, Tensor) or not count.is_cpu:
        return count
    least, most = count.aminmax()
    return most.item() if least == most else count


def _restarted(algorithm: LAFedOpt, client: Slots, broadcast: Slots, context: Context) -> Rate:
    step = _shared(context.step)
    return _corrected(algorithm, context.lr, step, step)


def _counted(algorithm: LocalAdam | DiLoCo, client: Slots, broadcast: Slots, context: Context) -> Rate:
    count = _shared(client.n)
    return _corrected(algorithm, context.lr, count, count)


def _continued(algorithm: FedAdamW, client: Slots, broadcast: Slots, context: Context) -> Rate:
    return _corrected(algorithm, context.lr, _shared(context.step), _shared(broadcast.t + context.step))


FUSED_STEPS: dict[Callable[..., Slots], FusedUpdate] = {
    FedAvg.step: FusedUpdate(),
    LocalSGD.step: FusedUpdate(),
    FedLALR.step: FusedUpdate(_amsgrad, maximum=True),
    AlignedLALR.step: FusedUpdate(_amsgrad, maximum=True),
    LAFedOpt.step: FusedUpdate(_restarted),
    LocalAdam.step: FusedUpdate(_counted, uniform=False, counts=True),
    DiLoCo.step: FusedUpdate(_counted, uniform=False, counts=True),
    FedAdamW.step: FusedUpdate(_continued, uniform=False),
}
"""An algorithm's `step` → what its fused form does without alignment. A subclass that overrides `step` has none."""


def fused_update(algorithm: Algorithm) -> FusedUpdate | None:
    """What an algorithm's fused step does, or None if it has none, as LAFedOpt with a correction."""
    update = FUSED_STEPS.get(type(algorithm).step)
    if isinstance(algorithm, LAFedOpt) and algorithm.correction != "none":
        return None
    if isinstance(algorithm, AlignedLALR | FedAdamW) and update is not None:
        return replace(update, aligned=algorithm.align > 0)
    return update


def fused_step(algorithm: Algorithm, device: torch.device | str, dtype: torch.dtype) -> FusedStep | None:
    """The fused form of an algorithm's local step, or None if there is none; use `local_step` then."""
    update = fused_update(algorithm)
    if update is None:
        return None
    if dtype == torch.float32 and kernels_available(device):
        return TritonStep(update, algorithm)
    return CPUStep(update, algorithm) if torch.device(device).type == "cpu" else None
