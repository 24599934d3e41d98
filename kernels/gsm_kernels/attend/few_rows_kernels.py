"""The two kernels of `few_rows.py`. Columns are numbered through: first `width` of the window, the oldest first, then
the K picks."""

import triton
import triton.language as tl

from .forward import LOG2_E, LOWEST, absorb, turn


@triton.jit(do_not_specialize=["R", "E", "F"])
def split(
    query_ptr,
    window_ptr,
    bank_ptr,
    index_ptr,
    bias_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    high_ptr,
    total_ptr,
    mixed_ptr,
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
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The online softmax of one row over one share of its columns: maxima, sums and mixtures, not yet divided."""
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
        entry = entry.to(loaded.dtype)
        product = tl.dot(query, tl.trans(entry), input_precision="ieee")
        if BIASED:  # by what it will be multiplied with
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
    high_ptr,
    total_ptr,
    mixed_ptr,
    sink_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    R,
    H: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """out of one row: its shares brought to one maximum and summed in their order, with the sink below the line."""
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
