"""Attention over a window and a selection: the backward kernels. Tiles and letters as in `forward`.

With p = exp2(z - lse), D = sum over channels of out * grad (out with the sink's share in its denominator) and
dS = p (grad . entry - D): the query's gradient is dS entry, an entry's is dS^T query + p^T grad, a bias's the sum of dS
over heads. Everything is in the rotated frame, except what is stored as a gradient of the query.
"""

# Triton's types say that calling one kernel from another does not return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from .forward import LOG2_E, reach, rows, turn


@triton.jit
def slopes(entry, query, grad, seen, lse, delta, scale):
    """Softmax p and dS, [N,M] for entries [N,C] and rows [M,C]; 0 where a row does not see an entry.

    Entries come first so that p and dS, as wgmma leaves them in registers, are left operands of an entry's gradient.
    """
    logit = tl.dot(entry, tl.trans(query), input_precision="ieee") * scale
    value = tl.dot(entry, tl.trans(grad), input_precision="ieee")
    p = tl.where(seen, tl.exp2(logit - lse), 0.0)
    return p, p * (value - delta)


@triton.jit(do_not_specialize=["start", "stop", "R", "E", "F"])  # else one is built for each way they divide by 16
def query_gradient(
    query_ptr,
    window_ptr,
    bank_ptr,
    index_ptr,
    bias_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    grad_ptr,
    out_ptr,
    lse_ptr,
    delta_ptr,
    turned_query_ptr,
    turned_grad_ptr,
    query_grad_ptr,
    bias_grad_ptr,
    pair_ptr,
    start,
    stop,
    scale,
    width,
    R,
    E,
    F,
    K,
    H: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    PICKS: tl.constexpr,
    BIASED: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of rows start..stop: the query's gradient, the bias's, and what each pick adds to its slot's, [rows,K,C].

    It also leaves what `window_gradient` reads again and again: D, the rotated query and the rotated gradient.
    """
    tiles = tl.cdiv(stop - start, QUERIES)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    first = start + tl.program_id(0) % tiles * QUERIES
    row, head, inside = rows(first, stop, H, QUERIES, HEADS)
    channel = tl.arange(0, C)[None, :]
    row_at = (batch * R + row) * H + head
    at, mask = row_at[:, None] * C + channel, inside[:, None]

    loaded = tl.load(grad_ptr + at, mask=mask, other=0.0)
    grad = loaded.to(tl.float32)
    delta = tl.sum(grad * tl.load(out_ptr + at, mask=mask, other=0.0).to(tl.float32), 1)
    tl.store(delta_ptr + row_at, delta, mask=inside)
    grad = turn(grad, cos_ptr, sin_ptr, batch, first, R, 1, QUERIES, HEADS, C, PAIRS).to(loaded.dtype)
    tl.store(turned_grad_ptr + at, grad, mask=mask)
    query = tl.load(query_ptr + at, mask=mask, other=0.0).to(tl.float32)
    query = turn(query, cos_ptr, sin_ptr, batch, first, R, 1, QUERIES, HEADS, C, PAIRS).to(loaded.dtype)
    tl.store(turned_query_ptr + at, query, mask=mask)

    lse = tl.load(lse_ptr + row_at, mask=inside, other=0.0)
    query_grad = tl.zeros([C, QUERIES * HEADS], tl.float32)
    natural = scale / LOG2_E  # C ** -0.5: `scale` holds the change of base as well

    begin, end = reach(position_ptr, batch, row, R, E, width, inside)
    for low in range(tl.min(begin), tl.minimum(E - R + first + QUERIES, E), BLOCK):
        place = low + tl.arange(0, BLOCK)
        entry = tl.load(window_ptr + (batch * E + place)[:, None] * C + channel, mask=(place < E)[:, None], other=0.0)
        seen = (place[:, None] >= begin[None, :]) & (place[:, None] <= end[None, :])
        _, slope = slopes(entry, query, grad, seen, lse[None, :], delta[None, :], scale)
        slope = (slope * natural).to(entry.dtype)
        query_grad = tl.dot(tl.trans(entry), slope, query_grad, input_precision="ieee")

    if PICKS:
        steps = tl.cdiv(K, BLOCK)
        for step in range(QUERIES * steps):
            owner = first + step // steps
            pick = step % steps * BLOCK + tl.arange(0, BLOCK)
            known = pick < tl.where(owner < stop, K, 0)
            pick_at = (batch * R + owner) * K + pick
            slot = tl.load(index_ptr + pick_at, mask=known, other=-1).to(tl.int32)
            entry = tl.load(bank_ptr + (batch * F + tl.maximum(slot, 0))[:, None] * C + channel)
            seen = (slot >= 0)[:, None] & (inside & (row == owner))[None, :]
            shifted = lse[None, :]
            if BIASED:
                shifted -= tl.load(bias_ptr + pick_at, mask=known, other=0.0).to(tl.float32)[:, None] * LOG2_E
            p, slope = slopes(entry, query, grad, seen, shifted, delta[None, :], scale)
            if BIASED:
                tl.store(bias_grad_ptr + pick_at, tl.sum(slope, 1), mask=known)
            slope = (slope * natural).to(entry.dtype)
            pair = tl.dot(p.to(entry.dtype), grad, input_precision="ieee")
            pair = tl.dot(slope, query, pair, input_precision="ieee")
            query_grad = tl.dot(tl.trans(entry), slope, query_grad, input_precision="ieee")
            pair_at = (batch * (stop - start) + owner - start) * K + pick
            tl.store(pair_ptr + pair_at[:, None] * C + channel, pair.to(entry.dtype), mask=known[:, None])

    query_grad = turn(tl.trans(query_grad), cos_ptr, sin_ptr, batch, first, R, -1, QUERIES, HEADS, C, PAIRS)
    tl.store(query_grad_ptr + at, query_grad.to(loaded.dtype), mask=mask)


@triton.jit
def window_gradient(
    query_ptr,
    grad_ptr,
    window_ptr,
    position_ptr,
    lse_ptr,
    delta_ptr,
    window_grad_ptr,
    scale,
    width,
    R,
    E,
    H: tl.constexpr,
    C: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of BLOCK window entries, from all rows that can see one of them; query and grad are rotated.

    Programs side by side see mostly the same rows. They start at different ones and come round, so that all visit a row
    at the same step, and only the first of them reads it from further away than the L2 cache.
    """
    blocks = tl.cdiv(E, BLOCK)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    low = tl.program_id(0) % blocks * BLOCK
    place = low + tl.arange(0, BLOCK)
    channel = tl.arange(0, C)[None, :]
    entry_at, mask = (batch * E + place)[:, None] * C + channel, (place < E)[:, None]
    entry = tl.load(window_ptr + entry_at, mask=mask, other=0.0)
    entry_grad = tl.zeros([BLOCK, C], tl.float32)
    natural = scale / LOG2_E

    start = tl.maximum(low - (E - R), 0)
    stop = tl.minimum(low + BLOCK + width - 1 - (E - R), R)
    steps = tl.cdiv(tl.maximum(stop - start, 0), QUERIES)
    for step in range(steps):
        first = start + (step + steps - start // QUERIES % steps) % steps * QUERIES
        row, head, inside = rows(first, stop, H, QUERIES, HEADS)
        row_at = (batch * R + row) * H + head
        at = row_at[:, None] * C + channel
        query = tl.load(query_ptr + at, mask=inside[:, None], other=0.0)
        grad = tl.load(grad_ptr + at, mask=inside[:, None], other=0.0)
        lse = tl.load(lse_ptr + row_at, mask=inside, other=0.0)
        delta = tl.load(delta_ptr + row_at, mask=inside, other=0.0)
        begin, end = reach(position_ptr, batch, row, R, E, width, inside)
        seen = (place[:, None] >= begin[None, :]) & (place[:, None] <= end[None, :])
        p, slope = slopes(entry, query, grad, seen, lse[None, :], delta[None, :], scale)
        entry_grad = tl.dot(p.to(entry.dtype), grad, entry_grad, input_precision="ieee")
        entry_grad = tl.dot((slope * natural).to(entry.dtype), query, entry_grad, input_precision="ieee")
    tl.store(window_grad_ptr + entry_at, entry_grad.to(entry.dtype), mask=mask)
