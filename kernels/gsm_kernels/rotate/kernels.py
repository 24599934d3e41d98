"""Triton kernel of the rotation. A program takes ROWS of N rows with D channels; HEADS neighbouring rows share angles.

Arithmetic is in float32.
"""

# By Triton's type hints, a call of one kernel from another does not return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])  # no address depends on it
def rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, N,
    SIGN: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the last PAIRS pairs of channels, forwards (SIGN 1) or back (-1)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < N)[:, None] & (column < D)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, turned(x, cos_ptr, sin_ptr, row, N, SIGN, HEADS, PAIRS, D), mask=inside)


@triton.jit
def turned(
    x, cos_ptr, sin_ptr, row, N, SIGN: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Return float32 rows [ROWS,BLOCK] with the last PAIRS pairs of D channels rotated."""
    if PAIRS > 0:
        pair = tl.arange(0, x.shape[1] // 2) - (D // 2 - PAIRS)
        at = (row // HEADS).to(tl.int64)[:, None] * PAIRS + pair[None, :]
        live = (row < N)[:, None] & ((pair >= 0) & (pair < PAIRS))[None, :]
        cos = tl.load(cos_ptr + at, mask=live, other=1.0).to(tl.float32)
        sin = SIGN * tl.load(sin_ptr + at, mask=live, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        x = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [x.shape[0], x.shape[1]])
    return x
