"""Triton kernels of attention over a window and a selection: forward, forward for a few rows, and backward.

The M rows of a tile are QUERIES neighbouring queries times HEADS heads (H, padded to a power of two), query by query.
Letters are those of `gsm_kernels.attend`. Logits are in base 2 and arithmetic is in float32; operands of matrix
products have the dtype of the inputs.
"""

# By Triton's type hints, a call of one kernel from another does not return.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # initial maximum: finite, so that -inf minus it is not NaN


@triton.jit
def rows(first, last, H: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Return query, head and mask of each row of a tile that starts at query `first`; all [M]."""
    number = tl.arange(0, QUERIES * HEADS)
    row, head = first + number // HEADS, number % HEADS
    return row, head, (row < last) & (head < H)


@triton.jit
def reach(position_ptr, batch, row, R, E, width, inside):
    """Return the first and last window entry that each row sees, [M]; first > last if it sees none."""
    position = tl.load(position_ptr + batch * R + row, mask=inside, other=-1).to(tl.int32)
    place = E - R + row
    return tl.maximum(place - tl.minimum(position, width - 1), 0), place


@triton.jit
def turn(
    x, cos_ptr, sin_ptr, batch, first, R,
    SIGN: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate the last PAIRS pairs of channels of a float32 tile [M,C], forwards (SIGN 1) or back (-1).

    In all layouts of these tiles a thread has both channels of a pair, so that no data moves between threads.
    """
    if PAIRS > 0:
        row = first + tl.arange(0, QUERIES)
        pair = tl.arange(0, C // 2) - (C // 2 - PAIRS)
        at = (batch * R + row)[:, None] * PAIRS + pair[None, :]
        turned = (row < R)[:, None] & (pair >= 0)[None, :]
        cos = tl.load(cos_ptr + at, mask=turned, other=1.0).to(tl.float32)[:, None, :]
        sin = SIGN * tl.load(sin_ptr + at, mask=turned, other=0.0).to(tl.float32)[:, None, :]
        a, b = tl.split(tl.reshape(x, [QUERIES, HEADS, C // 2, 2]))
        x = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), [QUERIES * HEADS, C])
    return x


@triton.jit
def absorb(product, entry, high, total, mixed, scale):
    """Add a tile of entries [N,C] to the online softmax. Products [M,N] are -inf for entries that a row does not see.

    Returns the new maximum, the sum of weights, and the unnormalised mixture [M,C].
    """
    higher = tl.maximum(high, tl.max(product, 1) * scale)
    weight = tl.exp2(product * scale - higher[:, None])
    fade = tl.exp2(high - higher)
    mixed = tl.dot(weight.to(entry.dtype), entry, mixed * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weight, 1), mixed


@triton.jit(do_not_specialize=["R", "E", "F"])  # they change while a cache grows
def forward(
    query_ptr, window_ptr, bank_ptr, index_ptr, bias_ptr, position_ptr, cos_ptr, sin_ptr, sink_ptr, out_ptr, lse_ptr,
    scale, width, R, E, F, K,
    H: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr, PICKS: tl.constexpr, BIASED: tl.constexpr, QUERIES:
    tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out and lse = log2( sum exp(z) + exp(sink) ) of a tile of rows: window, then selections, then sinks.

    One loop covers window and selections, so that the first selected entries are loaded while the window is computed.
    """
    tiles = tl.cdiv(R, QUERIES)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * QUERIES
    row, head, inside = rows(first, R, H, QUERIES, HEADS)
    channel = tl.arange(0, C)[None, :]
    at = (batch * R + row) * H + head
    loaded = tl.load(query_ptr + at[:, None] * C + channel, mask=inside[:, None], other=0.0)
    query = turn(loaded.to(tl.float32), cos_ptr, sin_ptr, batch, first, R, 1, QUERIES, HEADS, C, PAIRS).to(loaded.dtype)

    high = tl.full([QUERIES * HEADS], LOWEST, tl.float32)
    total = tl.zeros([QUERIES * HEADS], tl.float32)
    mixed = tl.zeros([QUERIES * HEADS, C], tl.float32)

    begin, end = reach(position_ptr, batch, row, R, E, width, inside)
    low, stop = tl.min(begin), tl.minimum(E - R + first + QUERIES, E)
    near = tl.cdiv(tl.maximum(stop - low, 0), BLOCK)
    far = tl.minimum(R - first, QUERIES) * tl.cdiv(K, BLOCK) if PICKS else 0
    for number in range(near + far):
        place = low + number * BLOCK + tl.arange(0, BLOCK)
        line = batch * E + tl.minimum(place, E - 1)
        source_ptr, lowest, highest = window_ptr, begin, end
        if PICKS:  # from step `near` on, entries are the picks of one query, and `place` is this query, or -1
            step, steps = tl.maximum(number - near, 0), tl.cdiv(K, BLOCK)
            owner, pick = first + step // steps, step % steps * BLOCK + tl.arange(0, BLOCK)
            valid, pick_at = pick < tl.where(number < near, 0, K), (batch * R + owner) * K + pick
            slot = tl.load(index_ptr + pick_at, mask=valid, other=-1).to(tl.int32)
            place = tl.where(number < near, place, tl.where(slot >= 0, owner, -1))
            line = tl.where(number < near, line, batch * F + tl.maximum(slot, 0))
            source_ptr = tl.where(number < near, window_ptr, bank_ptr)
            lowest, highest = tl.where(number < near, begin, row), tl.where(number < near, end, row)
        entry = tl.load(source_ptr + line[:, None] * C + channel)
        product = tl.dot(query, tl.trans(entry), input_precision="ieee")
        if BIASED:
            bias = tl.load(bias_ptr + pick_at, mask=valid, other=0.0).to(tl.float32)
            product += bias[None, :] * (LOG2_E / scale)
        seen = (place[None, :] >= lowest[:, None]) & (place[None, :] <= highest[:, None])
        high, total, mixed = absorb(tl.where(seen, product, float("-inf")), entry, high, total, mixed, scale)

    sink = tl.maximum(tl.load(sink_ptr + head, mask=head < H, other=0.0).to(tl.float32) * LOG2_E, LOWEST)
    higher = tl.maximum(high, sink)
    fade = tl.exp2(high - higher)
    total = total * fade + tl.exp2(sink - higher)
    mixed = turn(mixed * (fade / total)[:, None], cos_ptr, sin_ptr, batch, first, R, -1, QUERIES, HEADS, C, PAIRS)
    tl.store(out_ptr + at[:, None] * C + channel, mixed.to(loaded.dtype), mask=inside[:, None])
    tl.store(lse_ptr + at, higher + tl.log2(total), mask=inside)


# Forward for a few rows, in two kernels. The columns are `width` window entries, the oldest first, then the K picks.


@triton.jit(do_not_specialize=["R", "E", "F"])
def split(
    query_ptr, window_ptr, bank_ptr, index_ptr, bias_ptr, position_ptr, cos_ptr, sin_ptr, high_ptr, total_ptr,
    mixed_ptr,
    scale, width, R, E, F, K,
    H: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr, PICKS: tl.constexpr, BIASED: tl.constexpr, HEADS:
    tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute the online softmax of one query over a share of its columns: maxima, sums, unnormalised mixtures."""
    number, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    batch, row = (number // R).to(tl.int64), number % R
    head, channel = tl.arange(0, HEADS), tl.arange(0, C)[None, :]
    at = ((batch * R + row) * H + head)[:, None] * C + channel
    loaded = tl.load(query_ptr + at, mask=(head < H)[:, None], other=0.0)
    query = turn(loaded.to(tl.float32), cos_ptr, sin_ptr, batch, row, R, 1, 1, HEADS, C, PAIRS).to(loaded.dtype)

    high = tl.full([HEADS], LOWEST, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, C], tl.float32)

    last = E - R + row
    reach = tl.minimum(tl.load(position_ptr + batch * R + row).to(tl.int32), width - 1)
    columns = width + K if PICKS else width
    share = tl.cdiv(columns, SPLITS * BLOCK) * BLOCK
    for start in range(part * share, tl.minimum((part + 1) * share, columns), BLOCK):
        column = start + tl.arange(0, BLOCK)
        place = last - (width - 1) + column
        seen = (column < width) & (place >= last - reach) & (place >= 0)
        entry = tl.load(window_ptr + (batch * E + place)[:, None] * C + channel, mask=seen[:, None], other=0.0)
        if PICKS:
            pick_at = (batch * R + row) * K + column - width
            picked = (column >= width) & (column < columns)
            slot = tl.load(index_ptr + pick_at, mask=picked, other=-1)
            chosen = slot >= 0
            entry += tl.load(bank_ptr + (batch * F + slot)[:, None] * C + channel, mask=chosen[:, None], other=0.0)
            seen = seen | chosen
        entry = entry.to(loaded.dtype)  # a cache may have a wider dtype than the queries
        product = tl.dot(query, tl.trans(entry), input_precision="ieee")
        if BIASED:  # divided by `scale`, which multiplies the products later
            bias = tl.load(bias_ptr + pick_at, mask=picked, other=0.0).to(tl.float32)
            product += bias[None, :] * (LOG2_E / scale)
        product = tl.where(seen[None, :], product, float("-inf"))
        high, total, mixed = absorb(product, entry, high, total, mixed, scale)

    into = tl.program_id(0).to(tl.int64) * HEADS + head
    tl.store(high_ptr + into, high)
    tl.store(total_ptr + into, total)
    tl.store(mixed_ptr + into[:, None] * C + channel, mixed)


@triton.jit(do_not_specialize=["R"])
def join(
    high_ptr, total_ptr, mixed_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr,
    R,
    H: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Compute the output of one query: rescale its shares to one maximum, and sum them and the sink in order."""
    number = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, HEADS), tl.arange(0, C)[None, :]
    high = tl.maximum(tl.load(sink_ptr + head, mask=head < H, other=0.0).to(tl.float32) * LOG2_E, LOWEST)
    total = tl.full([HEADS], 1.0, tl.float32)
    mixed = tl.zeros([HEADS, C], tl.float32)
    for part in range(SPLITS):
        at = (number * SPLITS + part) * HEADS + head
        other = tl.load(high_ptr + at)
        higher = tl.maximum(high, other)
        fade, rise = tl.exp2(high - higher), tl.exp2(other - higher)
        total = total * fade + tl.load(total_ptr + at) * rise
        mixed = mixed * fade[:, None] + tl.load(mixed_ptr + at[:, None] * C + channel) * rise[:, None]
        high = higher
    mixed = turn(mixed / total[:, None], cos_ptr, sin_ptr, number // R, number % R, R, -1, 1, HEADS, C, PAIRS)
    into = (number * H + head)[:, None] * C + channel
    tl.store(out_ptr + into, mixed.to(out_ptr.dtype.element_ty), mask=(head < H)[:, None])


# Backward. Let p = exp2(z - lse), D = sum over channels of out * grad, and dS = p (grad . entry - D). The gradients are
# dS entry for the query, dS^T query + p^T grad for an entry, and the sum of dS over heads for a bias. They are computed
# with rotated queries and gradients; the gradient of the query is rotated back before it is stored.


@triton.jit
def slopes(entry, query, grad, seen, lse, delta, scale):
    """Return softmax p and dS, [N,M] for entries [N,C] and rows [M,C]; 0 for entries that a row does not see.

    Entries are the first dimension, so that p and dS are in registers as wgmma's left operand for the entry gradient.
    """
    logit = tl.dot(entry, tl.trans(query), input_precision="ieee") * scale
    value = tl.dot(entry, tl.trans(grad), input_precision="ieee")
    p = tl.where(seen, tl.exp2(logit - lse), 0.0)
    return p, p * (value - delta)


@triton.jit(do_not_specialize=["start", "stop", "R", "E", "F"])  # no variants by divisibility by 16
def query_gradient(
    query_ptr, window_ptr, bank_ptr, index_ptr, bias_ptr, position_ptr, cos_ptr, sin_ptr, grad_ptr, out_ptr, lse_ptr,
    delta_ptr, turned_query_ptr, turned_grad_ptr, query_grad_ptr, bias_grad_ptr, pair_ptr,
    start, stop, scale, width, R, E, F, K,
    H: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr, PICKS: tl.constexpr, BIASED: tl.constexpr, QUERIES:
    tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of query and bias for rows start..stop, and each pick's part of the bank's, [rows,K,C].

    It also stores D, the rotated query and the rotated gradient for `window_gradient`, which reads them repeatedly.
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
    natural = scale / LOG2_E  # C ** -0.5, because `scale` includes the change of base

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
            valid = pick < tl.where(owner < stop, K, 0)
            pick_at = (batch * R + owner) * K + pick
            slot = tl.load(index_ptr + pick_at, mask=valid, other=-1).to(tl.int32)
            entry = tl.load(bank_ptr + (batch * F + tl.maximum(slot, 0))[:, None] * C + channel)
            seen = (slot >= 0)[:, None] & (inside & (row == owner))[None, :]
            shifted = lse[None, :]
            if BIASED:
                shifted -= tl.load(bias_ptr + pick_at, mask=valid, other=0.0).to(tl.float32)[:, None] * LOG2_E
            p, slope = slopes(entry, query, grad, seen, shifted, delta[None, :], scale)
            if BIASED:
                tl.store(bias_grad_ptr + pick_at, tl.sum(slope, 1), mask=valid)
            slope = (slope * natural).to(entry.dtype)
            pair = tl.dot(p.to(entry.dtype), grad, input_precision="ieee")
            pair = tl.dot(slope, query, pair, input_precision="ieee")
            query_grad = tl.dot(tl.trans(entry), slope, query_grad, input_precision="ieee")
            pair_at = (batch * (stop - start) + owner - start) * K + pick
            tl.store(pair_ptr + pair_at[:, None] * C + channel, pair.to(entry.dtype), mask=valid[:, None])

    query_grad = turn(tl.trans(query_grad), cos_ptr, sin_ptr, batch, first, R, -1, QUERIES, HEADS, C, PAIRS)
    tl.store(query_grad_ptr + at, query_grad.to(loaded.dtype), mask=mask)


@triton.jit
def window_gradient(
    query_ptr, grad_ptr, window_ptr, position_ptr, lse_ptr, delta_ptr, window_grad_ptr,
    scale, width, R, E,
    H: tl.constexpr, C: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of BLOCK window entries from all rows that can see any of them; query and grad are rotated.

    Neighbouring programs read mostly the same rows. Each starts at a different one of its rows and wraps around, so
    that all programs read a row at the same step and share it in the L2 cache.
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
    tl.store(window_grad_ptr + entry_at, entry_grad.to(window_grad_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def sink_gradient(
    sink_ptr, lse_ptr, delta_ptr, sink_grad_ptr, N, H: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr
):  # fmt: skip
    """Compute the gradient of HEADS sinks: minus the sum over all N rows of softmax(sink) * D."""
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    sink = tl.load(sink_ptr + head, mask=head < H, other=0.0).to(tl.float32) * LOG2_E
    total = tl.zeros((ROWS, HEADS), tl.float32)
    for first in range(0, N, ROWS):
        row = first + tl.arange(0, ROWS)
        at, inside = row.to(tl.int64)[:, None] * H + head[None, :], (row < N)[:, None] & (head < H)[None, :]
        lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
        total += tl.exp2(sink[None, :] - lse) * tl.load(delta_ptr + at, mask=inside, other=0.0)
    tl.store(sink_grad_ptr + head, -tl.sum(total, 0), mask=head < H)
