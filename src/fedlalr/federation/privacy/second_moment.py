"""Second moments under privacy: derived on the server from noised changes, and used as a public scale.

Derived. The server knows the noised mean change Δ of x, the noise's standard deviation τ, the clients' rate α, their
number of steps K and the v̂ they started from. A client moves x by −α Σ m/√v̂, so that its mean gradient is about

    g = −Δ √v̂ / (α K),                  whose square is too large by its noise, v̂ τ² / (α K)² on average:
    v̂ ← max(ε², β2 v̂ + (1 − β2) v̂ (Δ² − τ²) / (α K)²)

This needs the noised change alone, so it costs no privacy. It has three properties that the clients' own rule lacks.
τ² is subtracted, since the error is proportional to v̂ itself: v̂ would grow exponentially on noise alone if τ > α K.
The maximum over rounds is left out, as the maximum of noisy numbers measures the noise. β2 applies once a round, as in
FedAdam, to average the noise over many rounds. Δ does not change with the scale of the gradients if v̂ is far below
their squares, so choose ε as the typical size of a gradient, as FedAdam's τ, and not as a guard against zero.

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

DEGREES = {"x": 0, "delta": 1, "m": 1, "c": 1, "v": 2, "v_hat": 2}
"""Slot → the power of the gradients with which its changes grow. FedAdam's v is the second moment of delta itself."""
MOST = 9.0
"""(Δ / (α K))² of honest clients' mean change is at most about this, since AMSGrad's longest step is about 3 α. More is
noise: at small rates α it could multiply v̂ in a single round."""
LEAST = 0.1
"""The smallest scale: a coordinate that has hardly moved must not use up the clip."""


def is_derivable(algorithm: Algorithm) -> bool:
    """Whether the formula above fits a method: local AMSGrad from x and v̂ alone."""
    table = algorithm.slots
    known = hasattr(algorithm, "betas") and hasattr(algorithm, "eps")
    return known and set(table.down) == set(table.up) == {"x", "v_hat"}


def derived(
    v_hat: Tensor, change: Tensor, deviation: float, *, lr: float, steps: int, beta2: float, eps: float
) -> Tensor:
    """v̂ after a round, from the noised mean change of x and the standard deviation of its noise."""
    ratio = ((change.double() ** 2 - deviation**2) / (lr * steps) ** 2).clamp(-MOST, MOST)
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
