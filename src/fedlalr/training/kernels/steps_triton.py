# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""The local steps of AMSGrad, Adam and SGD over a stack of clients, in place and in one pass through memory.

FedLALR's step reads the gradient, x, m, v and v̂ once and writes the last four once. The clipping factor and both kinds
of weight decay are folded in. `fused_steps` launches it; `local_step` around the algorithm's own step defines the
result.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def step_block(
    gradient, x, m, v, v_hat, lr, eps, lr_row, decay_lr, factor, active, decayed, d, d_row, share, share_row,
    place, client, elements, size, weight_decay, decoupled, beta1, beta2, CLIPPED: tl.constexpr, GUARDED: tl.constexpr,
    MASKED: tl.constexpr, ADAPTIVE: tl.constexpr, MAXIMUM: tl.constexpr, ALIGNED: tl.constexpr, PLACED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The step at some places. WHOLE: all of them exist and belong to one client, so memory moves in wide words."""
    keep = None if WHOLE else place < elements
    coordinate = place - client * size
    g = tl.load(gradient + place, mask=keep)
    x_old = tl.load(x + place, mask=keep)
    at = client * lr_row + coordinate if PLACED else client * lr_row
    rate = tl.load(lr + at, mask=keep)
    if CLIPPED:
        g *= tl.load(factor + client, mask=keep)
    g += weight_decay * x_old
    if MASKED:
        decoupled *= tl.load(decayed + coordinate, mask=keep)
    shrink = 1 - tl.load(decay_lr) * decoupled
    if ADAPTIVE:
        m_old = tl.load(m + place, mask=keep)
        v_old = tl.load(v + place, mask=keep)
        m_new = beta1 * m_old + (1 - beta1) * g
        v_new = beta2 * v_old + (1 - beta2) * g * g
        second = v_new
        if MAXIMUM:
            v_hat_old = tl.load(v_hat + place, mask=keep)
            second = tl.maximum(v_hat_old, v_new)
        x_new = x_old * shrink - tl.div_rn(rate * m_new, tl.sqrt_rn(second) + tl.load(eps + at, mask=keep))
    else:
        x_new = x_old * shrink - rate * g
    if ALIGNED:
        x_new += tl.load(share + client * share_row, mask=keep) * tl.load(d + client * d_row + coordinate, mask=keep)
    if GUARDED:
        on = tl.load(active + client, mask=keep) != 0
        x_new = tl.where(on, x_new, x_old)
        if ADAPTIVE:
            m_new = tl.where(on, m_new, m_old)
            v_new = tl.where(on, v_new, v_old)
            if MAXIMUM:
                second = tl.where(on, second, v_hat_old)
    tl.store(x + place, x_new, mask=keep)
    if ADAPTIVE:
        tl.store(m + place, m_new, mask=keep)
        tl.store(v + place, v_new, mask=keep)
        if MAXIMUM:
            tl.store(v_hat + place, second, mask=keep)


@triton.jit
def step(
    gradient, x, m, v, v_hat, lr, eps, lr_row, decay_lr, factor, active, decayed, d, d_row, share, share_row,
    elements, size, weight_decay, decoupled, beta1, beta2, CLIPPED: tl.constexpr, GUARDED: tl.constexpr,
    MASKED: tl.constexpr, ADAPTIVE: tl.constexpr, MAXIMUM: tl.constexpr, ALIGNED: tl.constexpr, PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One element-wise pass over `[C, P]`: AMSGrad, Adam, which has no v̂, or SGD, which has no m and v either.

    The number of client c at coordinate p is at `c · row + p` of `d` and, if PLACED, of `lr` and `eps`, and at
    `c · row` of the other two; a row of 0 is one that all clients share. `factor` and `active` are `[C]`; `decay_lr`,
    for the decoupled weight decay, is a scalar on the device; `decayed` `[P]` masks that decay.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    client = first // size
    if (first + BLOCK <= elements) & ((first + BLOCK - 1) // size == client):
        step_block(
            gradient, x, m, v, v_hat, lr, eps, lr_row, decay_lr, factor, active, decayed, d, d_row, share, share_row,
            place, client, elements, size, weight_decay, decoupled, beta1, beta2, CLIPPED, GUARDED, MASKED, ADAPTIVE,
            MAXIMUM, ALIGNED, PLACED, True,
        )  # fmt: skip
    else:
        step_block(
            gradient, x, m, v, v_hat, lr, eps, lr_row, decay_lr, factor, active, decayed, d, d_row, share, share_row,
            place, place // size, elements, size, weight_decay, decoupled, beta1, beta2, CLIPPED, GUARDED, MASKED,
            ADAPTIVE, MAXIMUM, ALIGNED, PLACED, False,
        )  # fmt: skip
