"""A kernel whose program is known to be wrong: the control of `hazards.unwritten`.

ptxas 12.8, which Triton 3.5 to 3.7.1 bring, takes descriptors of shared memory from a uniform register that nothing
writes, in gradients of gated linear attention with 32 channels and four warps (triton-lang/triton#11366).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gradients(
    grad,
    value,
    state,
    state_grad,
    key,
    query,
    query_grad,
    key_grad,
    C: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, wide = tl.arange(0, C), tl.arange(0, D)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    grads = tl.load(grad + row[:, None] * D + wide[None, :])
    values = tl.load(value + row[:, None] * D + wide[None, :])
    states = tl.load(state + column[:, None] * D + wide[None, :])
    state_grads = tl.load(state_grad + column[:, None] * D + wide[None, :])
    scores = tl.dot(grads, tl.trans(values))
    query_sum = tl.dot(grads, tl.trans(states))
    key_sum = tl.dot(values, tl.trans(state_grads))
    keys = tl.load(key + row[:, None] * D + column[None, :])
    queries = tl.load(query + row[:, None] * D + column[None, :])
    scores = tl.where(row[:, None] >= row[None, :], scores, 0.0).to(keys.dtype)
    query_sum += tl.dot(scores, keys)
    key_sum += tl.dot(tl.trans(scores), queries)
    tl.store(query_grad + row[:, None] * D + column[None, :], query_sum.to(query_grad.dtype.element_ty))
    tl.store(key_grad + row[:, None] * D + column[None, :], key_sum.to(key_grad.dtype.element_ty))
