# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Products of few rows with a large matrix for each client, and their gradients: bound by reading that matrix once.

Rows are `[C, N, K]` with at most `ROWS` rows, weights `[C, O, K]` with clients `weight_stride` apart, outputs
`[C, N, O]`. The library's kernels for such products read the matrix at a quarter of the memory's speed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(x, column, rows, columns, ROWS: tl.constexpr):
    """Some columns of a client's rows, `[ROWS, len(column)]`; zero beyond the last of either."""
    row = tl.arange(0, ROWS)[:, None]
    return tl.load(x + row * columns + column[None, :], mask=(row < rows) & (column < columns)[None, :], other=0.0)


@triton.jit
def store_rows(out, tile, column, rows, columns, ROWS: tl.constexpr):
    """Write some columns of a client's rows."""
    row = tl.arange(0, ROWS)[:, None]
    tl.store(out + row * columns + column[None, :], tile, mask=(row < rows) & (column < columns)[None, :])


@triton.jit
def load_weights(weight, output, column, outputs, columns):
    """Some columns of some rows of a client's matrix, `[len(output), len(column)]`."""
    real = (output < outputs)[:, None] & (column < columns)[None, :]
    return tl.load(weight + output[:, None] * columns + column[None, :], mask=real, other=0.0)


@triton.jit
def narrow_product(
    x, weight, out, weight_stride, clients, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, SHARE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some outputs of a client, summed over SHARE of the columns.

    `out` is `[parts, C, N, O]`; the caller sums the parts, always in the same order.
    """
    which = tl.program_id(1)
    part, client = which // clients, (which % clients).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    x += client * rows * columns
    weight += client * weight_stride
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, SHARE, COLUMNS):
        column = part * SHARE + first + tl.arange(0, COLUMNS)
        seen = load_rows(x, column, rows, columns, ROWS)
        matrix = load_weights(weight, output, column, outputs, columns)
        total = tl.dot(seen, tl.trans(matrix), total, input_precision=PRECISION)
    store_rows(out + which.to(tl.int64) * rows * outputs, total, output, rows, outputs, ROWS)


@triton.jit
def narrow_input_gradient(
    slope, weight, out, weight_stride, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradient of a client's rows."""
    client = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slope += client * rows * outputs
    weight += client * weight_stride
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, outputs, OUTPUTS):
        output = first + tl.arange(0, OUTPUTS)
        seen = load_rows(slope, output, rows, outputs, ROWS)
        matrix = load_weights(weight, output, column, outputs, columns)
        total = tl.dot(seen, matrix, total, input_precision=PRECISION)
    store_rows(out + client * rows * columns, total, column, rows, columns, ROWS)


@triton.jit
def narrow_weight_gradient(
    x, slope, out, out_stride, rows, outputs, columns,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some columns of the gradient of a client's matrix; clients are `out_stride` apart in `out`."""
    client = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slope += client * rows * outputs
    out += client * out_stride
    seen = load_rows(x + client * rows * columns, column, rows, columns, ROWS)
    for first in range(0, outputs, OUTPUTS):
        output = first + tl.arange(0, OUTPUTS)
        slopes = load_rows(slope, output, rows, outputs, ROWS)
        gradient = tl.dot(tl.trans(slopes), seen, input_precision=PRECISION)
        real = (output < outputs)[:, None] & (column < columns)[None, :]
        tl.store(out + output[:, None] * columns + column[None, :], gradient, mask=real)
