# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Triton kernels for an LSTM's recurrence over all time steps at once, forward and backward.

One program owns some sequences of one client. It keeps that client's four recurrent matrices on chip and iterates over
time itself, so a step needs no launch and no reload of the weights. Sizes are padded to a power of two with zeros,
which stay zero in the recurrence. Operands of products are bfloat16, the cell state and all arithmetic float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """The hyperbolic tangent, from the logistic function."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def load_matrices(weight, client, SIZE: tl.constexpr, TRANSPOSED: tl.constexpr):
    """The four gates' matrices `[out, in]` of a client, or their transposes."""
    out = tl.arange(0, SIZE)
    place = out[:, None] + out[None, :] * SIZE if TRANSPOSED else out[:, None] * SIZE + out[None, :]
    place += client * 4 * SIZE * SIZE
    wi = tl.load(weight + place)
    wf = tl.load(weight + place + SIZE * SIZE)
    wg = tl.load(weight + place + 2 * SIZE * SIZE)
    wo = tl.load(weight + place + 3 * SIZE * SIZE)
    return wi, wf, wg, wo


@triton.jit
def load_gates(gates, place, valid, SIZE: tl.constexpr):
    """Load four adjacent tiles as float32."""
    i = tl.load(gates + place, mask=valid, other=0.0).to(tl.float32)
    f = tl.load(gates + place + SIZE, mask=valid, other=0.0).to(tl.float32)
    g = tl.load(gates + place + 2 * SIZE, mask=valid, other=0.0).to(tl.float32)
    o = tl.load(gates + place + 3 * SIZE, mask=valid, other=0.0).to(tl.float32)
    return i, f, g, o


@triton.jit
def store_gates(gates, place, valid, i, f, g, o, SIZE: tl.constexpr):
    """Write four adjacent tiles, rounded."""
    tl.store(gates + place, i.to(tl.bfloat16), mask=valid)
    tl.store(gates + place + SIZE, f.to(tl.bfloat16), mask=valid)
    tl.store(gates + place + 2 * SIZE, g.to(tl.bfloat16), mask=valid)
    tl.store(gates + place + 3 * SIZE, o.to(tl.bfloat16), mask=valid)


@triton.jit
def lstm_forward(projected, weight, bias, hidden, cells, gates, steps, batch, SIZE: tl.constexpr, TILE: tl.constexpr):
    """From input projections `[C, T, B, 4, SIZE]` to hidden states, cell states `[C, T, B, SIZE]` and gates."""
    client = tl.program_id(1)
    sequence = (tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None]
    unit = tl.arange(0, SIZE)[None, :]
    valid = sequence < batch
    wi, wf, wg, wo = load_matrices(weight, client, SIZE, True)
    bi, bf, bg, bo = load_gates(bias, client * 4 * SIZE + unit, unit < SIZE, SIZE)
    place = client.to(tl.int64) * steps * batch * SIZE + sequence * SIZE + unit
    wide = client.to(tl.int64) * steps * batch * 4 * SIZE + sequence * 4 * SIZE + unit
    h = tl.zeros([TILE, SIZE], tl.bfloat16)
    c = tl.zeros([TILE, SIZE], tl.float32)
    xi, xf, xg, xo = load_gates(projected, wide, valid, SIZE)
    for t in range(steps):
        # Prefetch the next step's inputs: this step's products hide the latency.
        # The mask is one comparison: Triton 3.9's interpreter rejects `valid & (t + 1 < steps)`.
        ahead = wide + batch * 4 * SIZE
        more = sequence < tl.where(t + 1 < steps, batch, 0)
        ni, nf, ng, no = load_gates(projected, ahead, more, SIZE)
        i = tl.sigmoid(tl.dot(h, wi) + (xi + bi))
        f = tl.sigmoid(tl.dot(h, wf) + (xf + bf))
        g = tanh(tl.dot(h, wg) + (xg + bg))
        o = tl.sigmoid(tl.dot(h, wo) + (xo + bo))
        c = f * c + i * g
        h = (o * tanh(c)).to(tl.bfloat16)
        tl.store(hidden + place, h, mask=valid)
        tl.store(cells + place, c, mask=valid)
        store_gates(gates, wide, valid, i, f, g, o, SIZE)
        place += batch * SIZE
        wide = ahead
        xi, xf, xg, xo = ni, nf, ng, no


@triton.jit
def lstm_backward(dhidden, weight, cells, gates, dgates, steps, batch, SIZE: tl.constexpr, TILE: tl.constexpr):
    """From gradients of the hidden states to gradients of the four gates' arguments."""
    client = tl.program_id(1)
    sequence = (tl.program_id(0) * TILE + tl.arange(0, TILE))[:, None]
    unit = tl.arange(0, SIZE)[None, :]
    valid = sequence < batch
    wi, wf, wg, wo = load_matrices(weight, client, SIZE, False)
    last = (client.to(tl.int64) + 1) * steps - 1
    place = last * batch * SIZE + sequence * SIZE + unit
    wide = last * batch * 4 * SIZE + sequence * 4 * SIZE + unit
    dh = tl.zeros([TILE, SIZE], tl.float32)
    dc = tl.zeros([TILE, SIZE], tl.float32)
    c = tl.load(cells + place, mask=valid, other=0.0)
    i, f, g, o = load_gates(gates, wide, valid, SIZE)
    given = tl.load(dhidden + place, mask=valid, other=0.0).to(tl.float32)
    for t in range(steps):
        # prefetch what the previous step needs: this step's work hides the latency
        before, wide_before = place - batch * SIZE, wide - batch * 4 * SIZE
        more = sequence < tl.where(t + 1 < steps, batch, 0)
        c_before = tl.load(cells + before, mask=more, other=0.0)
        ni, nf, ng, no = load_gates(gates, wide_before, more, SIZE)
        given_before = tl.load(dhidden + before, mask=more, other=0.0).to(tl.float32)
        dh += given
        squashed = tanh(c)
        dc += dh * o * (1.0 - squashed * squashed)
        di = (dc * g * i * (1.0 - i)).to(tl.bfloat16)
        df = (dc * c_before * f * (1.0 - f)).to(tl.bfloat16)
        dg = (dc * i * (1.0 - g * g)).to(tl.bfloat16)
        do = (dh * squashed * o * (1.0 - o)).to(tl.bfloat16)
        store_gates(dgates, wide, valid, di, df, dg, do, SIZE)
        dh = (tl.dot(di, wi) + tl.dot(df, wf)) + (tl.dot(dg, wg) + tl.dot(do, wo))
        dc *= f
        c, given, place, wide = c_before, given_before, before, wide_before
        i, f, g, o = ni, nf, ng, no
