"""Triton kernels of RMSNorm with an optional rotation. A program takes ROWS rows of D elements at a time.

N is the number of rows. HEADS neighbouring rows share PAIRS angles; PAIRS = 0 is no rotation. Arithmetic is in float32.
"""

import triton
import triton.language as tl

from ..rotate.kernels import turned


@triton.jit
def inverse_norm(x, row, eps, N, D: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + eps), and a finite number for rows past the end. These are zeros, so with eps = 0 the
    inverse would be infinite, and 0 * inf is NaN."""
    return tl.rsqrt(tl.where(row < N, tl.sum(x * x, 1) / D + eps, 1.0))


@triton.jit(do_not_specialize=["N"])  # no address depends on it
def forward(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, eps, N,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out = x / sqrt(mean(x^2) + eps) * weight, and rotate its last channels."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    inverse = inverse_norm(x, row, eps, N, D)
    out = x * inverse[:, None] * weight[None, :]
    tl.store(out_ptr + at, turned(out, cos_ptr, sin_ptr, row, N, 1, HEADS, PAIRS, D), mask=inside)


@triton.jit(do_not_specialize=["N"])
def backward(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, x_grad_ptr, partial_ptr, eps, N,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x, and this program's part of the weight's: the sum over every P-th tile of rows."""
    column = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    partial = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(tl.program_id(0) * ROWS, N, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < N)[:, None] & (column < D)[None, :]
        at = row.to(tl.int64)[:, None] * D + column[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = turned(grad, cos_ptr, sin_ptr, row, N, -1, HEADS, PAIRS, D)
        inverse = inverse_norm(x, row, eps, N, D)
        normed = x * inverse[:, None]
        scaled = grad * weight[None, :]
        along = tl.sum(scaled * normed, 1) / D
        tl.store(x_grad_ptr + at, (scaled - normed * along[:, None]) * inverse[:, None], mask=inside)
        partial += grad * normed
    at = tl.program_id(0).to(tl.int64) * D + column
    tl.store(partial_ptr + at, tl.sum(partial, 0), mask=column < D)
