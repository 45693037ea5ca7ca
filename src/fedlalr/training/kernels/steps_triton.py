# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The local steps of FedLALR, AlignedLALR and SGD over a stack of clients, in place and in one pass through memory.

FedLALR's step reads the gradient, x, m, v and v̂ once and writes the last four once. The clipping factor and both kinds
of weight decay are folded in. `fused_steps` launches it; `local_step` around the algorithm's own step defines the
result.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_block(
    gradient, x, m, v, v_hat, lr, decay_lr, factor, active, decayed, d, share, place, client, elements, size,
    weight_decay, decoupled, beta1, beta2, eps, CLIPPED: tl.constexpr, GUARDED: tl.constexpr, MASKED: tl.constexpr,
    AMSGRAD: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The step at some places. WHOLE: all of them exist and belong to one client, so memory moves in wide words."""
    keep = None if WHOLE else place < elements
    g = tl.load(gradient + place, mask=keep)
    x_old = tl.load(x + place, mask=keep)
    rate = tl.load(lr)
    if CLIPPED:
        g *= tl.load(factor + client, mask=keep)
    g += weight_decay * x_old
    if MASKED:
        decoupled *= tl.load(decayed + (place - client * size), mask=keep)
    shrink = 1 - tl.load(decay_lr) * decoupled
    if AMSGRAD:
        m_old = tl.load(m + place, mask=keep)
        v_old = tl.load(v + place, mask=keep)
        v_hat_old = tl.load(v_hat + place, mask=keep)
        m_new = beta1 * m_old + (1 - beta1) * g
        v_new = beta2 * v_old + (1 - beta2) * g * g
        v_hat_new = tl.maximum(v_hat_old, v_new)
        x_new = x_old * shrink - tl.div_rn(rate * m_new, tl.sqrt_rn(v_hat_new) + eps)
    else:
        x_new = x_old * shrink - rate * g
    if ALIGNED:
        x_new += tl.load(share + client, mask=keep) * tl.load(d + (place - client * size), mask=keep)
    if GUARDED:
        on = tl.load(active + client, mask=keep) != 0
        x_new = tl.where(on, x_new, x_old)
        if AMSGRAD:
            m_new = tl.where(on, m_new, m_old)
            v_new = tl.where(on, v_new, v_old)
            v_hat_new = tl.where(on, v_hat_new, v_hat_old)
    tl.store(x + place, x_new, mask=keep)
    if AMSGRAD:
        tl.store(m + place, m_new, mask=keep)
        tl.store(v + place, v_new, mask=keep)
        tl.store(v_hat + place, v_hat_new, mask=keep)


@triton.jit
def step(
    gradient, x, m, v, v_hat, lr, decay_lr, factor, active, decayed, d, share, elements, size,
    weight_decay, decoupled, beta1, beta2, eps, CLIPPED: tl.constexpr, GUARDED: tl.constexpr, MASKED: tl.constexpr,
    AMSGRAD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One element-wise pass over `[C, P]`: AMSGrad, or SGD, which has no m, v and v̂.

    `factor`, `active` and `share` are `[C]`, `d` is `[P]`; `lr` and, for the decoupled weight decay, `decay_lr`
    are scalars on the device; `decayed` `[P]` masks that decay.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    client = first // size
    if (first + BLOCK <= elements) & ((first + BLOCK - 1) // size == client):
        step_block(
            gradient, x, m, v, v_hat, lr, decay_lr, factor, active, decayed, d, share, place, client, elements, size,
            weight_decay, decoupled, beta1, beta2, eps, CLIPPED, GUARDED, MASKED, AMSGRAD, ALIGNED, True,
        )  # fmt: skip
    else:
        step_block(
            gradient, x, m, v, v_hat, lr, decay_lr, factor, active, decayed, d, share, place, place // size,
            elements, size, weight_decay, decoupled, beta1, beta2, eps, CLIPPED, GUARDED, MASKED, AMSGRAD, ALIGNED,
            False,
        )  # fmt: skip
