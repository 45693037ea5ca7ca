"""Second moments under privacy: derived on the server from noised changes, and used as a public scale.

Derived. The server knows the noised mean change Δ of x, the variance τ² of its noise and the v̂ that clients started
from. A client moves x by −α Σ m/√v̂, so its mean gradient is proportional to g = Δ √v̂, and v̂ follows g², as in Adam:

    r = mean over the parameter tensor of (Δ² − τ²)  /  mean over all coordinates of (Δ² − τ²)
    v̂ ← max(ε², β2 v̂ + (1 − β2) v̂ r)

This uses the noised change alone, so it costs no privacy. τ² is subtracted, or v̂ would follow the noise. Means are over
tensors, since the square of one noised coordinate says hardly anything; clients still adapt to each coordinate. Only
the ratio of tensors is used: clipping shortens Δ, which therefore does not tell the size of gradients. So choose ε as
large as a typical gradient, as for FedAdam, and not as a guard against zero. The maximum over rounds is left out, since
the maximum of noisy numbers measures the noise. β2 applies once a round, to average over many.

Scaled. The second moment that the server broadcast is public, and so is s = √v̂ / √mean(v̂), at least `LEAST`. A slot
that grows with the gradients to the power of d (its degree) is clipped and noised in units of s^d: numbers are then of
similar size, and equal noise hurts the small ones less. Changes of x by methods that divide by √v̂ have degree 0: they
are scaled already. As long as v̂ is the same everywhere, as in the first round, s is 1: a fixed scale.

To scale first and then privatise is proposed in arXiv 2507.01129.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedlalr.algorithms.slots import Algorithm, Slots
from fedlalr.training.layout import Layout

DEGREES = {"x": 0, "delta": 1, "m": 1, "c": 1, "v": 2, "v_hat": 2}
"""Slot → the power of the gradients with which its changes grow. FedAdam's v is the second moment of delta itself."""
MOST = 10.0
"""The largest r. A tensor that moves even more is slowed down over several rounds."""
LEAST = 0.1
"""The smallest scale: a coordinate that has hardly moved must not use up the clip."""


def is_derivable(algorithm: Algorithm) -> bool:
    """Whether the formula above fits a method: local AMSGrad from x and v̂ alone."""
    table = algorithm.slots
    known = hasattr(algorithm, "betas") and hasattr(algorithm, "eps")
    return known and set(table.down) == set(table.up) == {"x", "v_hat"}


def derived(v_hat: Tensor, change: Tensor, variance: float, layout: Layout, *, beta2: float, eps: float) -> Tensor:
    """v̂ after a round, from the noised mean change of x and the variance of its noise."""
    power = change.double() ** 2 - variance
    typical = power.mean()
    ratio = torch.where(typical > 0, layout.block_means(power) / typical, 1.0).clamp(0.0, MOST)
    v = v_hat.double()
    return (beta2 * v + (1 - beta2) * v * ratio).clamp(min=eps**2).to(v_hat.dtype)


def second_moment_of(server: Mapping[str, Tensor]) -> Tensor | None:
    """The server's second moment, if it has one."""
    return server.get("v_hat", server.get("v"))


def scales(server: Slots, up: Mapping[str, object]) -> dict[str, Tensor]:
    """The public scale of every slot that has one, from the server's slots `[P]`."""
    second = second_moment_of(server)
    assert second is not None  # `Privacy.check`
    root = second.double().clamp(min=0.0).sqrt()
    typical = root.square().mean().sqrt()
    s = torch.where(typical > 0, root / typical, 1.0).clamp(min=LEAST)
    return {slot: s ** DEGREES[slot] for slot in up if DEGREES[slot]}
