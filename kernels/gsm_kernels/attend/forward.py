"""Attention over a window and a selection: the forward kernel, and what it shares with the backward ones.

A tile's M rows are Q neighbouring queries times HEADS heads (H, padded to a power of two), query by query. Sizes as in
`gsm_kernels.attend`; logits are in base 2 and arithmetic is in float32, matrix products in the dtype of the inputs.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # a maximum before anything was seen: finite, so that -inf minus it is not a NaN


@triton.jit
def rows(first, last, H: tl.constexpr, QUERIES: tl.constexpr, HEADS: tl.constexpr):
    """Row, head, and whether there is such a row, of a tile that starts at row `first`; all [M]."""
    number = tl.arange(0, QUERIES * HEADS)
    row, head = first + number // HEADS, number % HEADS
    return row, head, (row < last) & (head < H)


@triton.jit
def reach(position_ptr, batch, row, R, E, width, inside):
    """First and last stream place that each row sees, [M]; the first is after the last where it sees nothing."""
    position = tl.load(position_ptr + batch * R + row, mask=inside, other=-1).to(tl.int32)
    place = E - R + row
    return tl.maximum(place - tl.minimum(position, width - 1), 0), place


@triton.jit
def turn(
    x,
    cos_ptr,
    sin_ptr,
    batch,
    first,
    R,
    SIGN: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Rotate the last PAIRS pairs of channels of a float32 tile [M,C], forth (SIGN 1) or back (-1).

    The pair axis lies within a thread in every layout that these tiles come in, so that nothing moves between threads.
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
    """One more tile of the online softmax: query . entry [M,N] of entries [N,C], -inf where a row does not see one."""
    higher = tl.maximum(high, tl.max(product, 1) * scale)
    weight = tl.exp2(product * scale - higher[:, None])
    fade = tl.exp2(high - higher)
    mixed = tl.dot(weight.to(entry.dtype), entry, mixed * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(weight, 1), mixed


@triton.jit(do_not_specialize=["R", "E", "F"])  # they change while a memory grows
def forward(
    query_ptr,
    window_ptr,
    bank_ptr,
    index_ptr,
    bias_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    sink_ptr,
    out_ptr,
    lse_ptr,
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
    """out and lse = log2( sum exp(z) + exp(sink) ) of one tile of rows: its window, then its selections, then sinks."""
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
    for low in range(tl.min(begin), tl.minimum(E - R + first + QUERIES, E), BLOCK):
        place = low + tl.arange(0, BLOCK)
        entry = tl.load(window_ptr + (batch * E + place)[:, None] * C + channel, mask=(place < E)[:, None], other=0.0)
        entry = entry.to(loaded.dtype)  # a memory may be wider than the rows that read it
        product = tl.dot(query, tl.trans(entry), input_precision="ieee")
        seen = (place[None, :] >= begin[:, None]) & (place[None, :] <= end[:, None])
        high, total, mixed = absorb(tl.where(seen, product, float("-inf")), entry, high, total, mixed, scale)

    if PICKS:
        steps = tl.cdiv(K, BLOCK)
        for step in range(tl.minimum(R - first, QUERIES) * steps):
            owner = first + step // steps
            pick = step % steps * BLOCK + tl.arange(0, BLOCK)
            known = pick < K
            pick_at = (batch * R + owner) * K + pick
            slot = tl.load(index_ptr + pick_at, mask=known, other=-1).to(tl.int32)
            entry = tl.load(bank_ptr + (batch * F + tl.maximum(slot, 0))[:, None] * C + channel).to(loaded.dtype)
            product = tl.dot(query, tl.trans(entry), input_precision="ieee")
            if BIASED:
                bias = tl.load(bias_ptr + pick_at, mask=known, other=0.0).to(tl.float32)
                product += bias[None, :] * (LOG2_E / scale)
            seen = (row == owner)[:, None] & (slot >= 0)[None, :]
            high, total, mixed = absorb(tl.where(seen, product, float("-inf")), entry, high, total, mixed, scale)

    sink = tl.maximum(tl.load(sink_ptr + head, mask=head < H, other=0.0).to(tl.float32) * LOG2_E, LOWEST)
    higher = tl.maximum(high, sink)
    fade = tl.exp2(high - higher)
    total = total * fade + tl.exp2(sink - higher)
    mixed = turn(mixed * (fade / total)[:, None], cos_ptr, sin_ptr, batch, first, R, -1, QUERIES, HEADS, C, PAIRS)
    tl.store(out_ptr + at[:, None] * C + channel, mixed.to(loaded.dtype), mask=inside[:, None])
    tl.store(lse_ptr + at, higher + tl.log2(total), mask=inside)
