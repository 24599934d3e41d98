"""Triton kernels that compute index scores tile by tile, and choose the k highest scores of a row exactly.

Letters: J index heads, I their width, F slots, R rows of a sequence. A launch takes rows [row0, row0 + rows) of the
sequences from batch0 on; its buffers have one line per row. All rows of a program are in the same sequence.
"""

# pyright: reportGeneralTypeIssues=false
# By Triton's type hints, a call of one kernel from another does not return.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "groups", "ordinals"])
def best_of_groups(
    query_ptr, weight_ptr, key_ptr, first_ptr, last_ptr, member_ptr, best_ptr,
    batch0, row0, rows, R, F, groups, ordinals, block,
    J: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, POOLED: tl.constexpr, WIDTH: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the highest visible score of each group of GROUP neighbouring slots, -inf if none is visible.

    A program computes a tile of ROWS x SLOTS scores in registers, one head after the other. A tile is skipped if none
    of its rows sees a slot of it; its results stay uninitialised.
    """
    row_tiles, slot_tiles = tl.cdiv(rows, ROWS), tl.cdiv(F, SLOTS)
    tile = tl.program_id(0) // slot_tiles
    start = (tl.program_id(0) % slot_tiles) * SLOTS
    batch = batch0 + tile // row_tiles
    at = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
    inside = at < rows
    row = batch.to(tl.int64) * R + row0 + at
    first = tl.load(first_ptr + row, mask=inside, other=F).to(tl.int32)
    last = tl.load(last_ptr + row, mask=inside, other=0).to(tl.int32)
    if (tl.max(last, 0) > start) & (tl.min(first, 0) < start + SLOTS):
        slot = start + tl.arange(0, SLOTS)
        channel = tl.arange(0, WIDTH)
        entry = batch.to(tl.int64) * F + slot
        key = tl.load(
            key_ptr + entry[:, None] * I + channel[None, :],
            mask=(slot < F)[:, None] & (channel < I)[None, :],
            other=0.0,
        )
        score = tl.zeros((ROWS, SLOTS), tl.float32)
        for head in range(J):
            query = tl.load(
                query_ptr + (row * J + head)[:, None] * I + channel[None, :],
                mask=inside[:, None] & (channel < I)[None, :],
                other=0.0,
            )
            weight = tl.load(weight_ptr + row * J + head, mask=inside, other=0.0).to(tl.float32)
            fired = tl.maximum(tl.dot(query, tl.trans(key), input_precision="ieee"), 0.0, tl.PropagateNan.ALL)
            score += weight[:, None] * fired
        seen = inside[:, None] & (slot[None, :] >= first[:, None]) & (slot[None, :] < last[:, None])
        line = (tile // row_tiles) * rows + at  # int32 is enough: the buffers of a chunk are small
        if POOLED:
            ordinal = (slot[None, :] - first[:, None]) // block
            seen &= tl.load(member_ptr + (line[:, None] * ordinals + ordinal), mask=seen, other=0) != 0
        best = tl.where(seen, score, float("-inf"))
        group = start // GROUP + tl.arange(0, SLOTS // GROUP)
        if GROUP > 1:
            best = tl.where(best > float("-inf"), best, float("-inf"))  # NaN becomes -inf
            best = tl.max(tl.reshape(best, (ROWS, SLOTS // GROUP, GROUP)), 2)
        inside_2d = inside[:, None] & (group < groups)[None, :]
        tl.store(best_ptr + (line[:, None] * groups + group[None, :]), best, mask=inside_2d)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "columns"])
def choose(
    score_ptr, first_ptr, last_ptr, out_ptr,
    batch0, row0, rows, R, columns, k,
    GROUP: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the k best groups (with GROUP = 1, slots) that a row sees.

    With SPAN > 1, first choose the k best of SIZE spans of SPAN neighbouring groups, then the k best groups of these.
    The spans are stored in `out_ptr`, which the groups then overwrite.
    """
    line, first, last = _row(first_ptr, last_ptr, batch0, row0, rows, R)
    span, low, out = tl.arange(0, SIZE), first // GROUP, out_ptr + line * k
    end = tl.where(first < last, last, 0)
    score_ptr += line * columns + low
    if SPAN == 1:
        score = tl.load(score_ptr + span, mask=(low + span) * GROUP < end, other=float("-inf"))
        _write_highest(score, low + span, out, k, SIZE, K)
    else:
        best = tl.full((SIZE,), float("-inf"), tl.float32)
        for member in range(SPAN):  # one after the other, because all at once would need too many registers
            group = span * SPAN + member
            score = tl.load(score_ptr + group, mask=(low + group) * GROUP < end, other=float("-inf"))
            best = tl.where(score > best, score, best)  # false for NaN
        _write_highest(best, span, out, k, SIZE, K)
        tl.debug_barrier()
        place = tl.arange(0, K * SPAN)
        chosen = tl.load(out + place // SPAN, mask=place // SPAN < k, other=-1).to(tl.int32)
        tl.debug_barrier()
        group = chosen * SPAN + place % SPAN
        inside = (chosen >= 0) & ((low + group) * GROUP < end)
        score = tl.load(score_ptr + group, mask=inside, other=float("-inf"))
        _write_highest(score, low + group, out, k, K * SPAN, K)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "columns", "ordinals"])
def choose_listed(
    score_ptr, group_ptr, first_ptr, last_ptr, member_ptr, out_ptr,
    batch0, row0, rows, R, columns, ordinals, block, k,
    GROUP: tl.constexpr, POOLED: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the k best slots of the k groups listed for a row, from the scores of all their slots."""
    line, first, last = _row(first_ptr, last_ptr, batch0, row0, rows, R)
    column = tl.arange(0, SIZE)
    group = tl.load(group_ptr + line * k + column // GROUP, mask=column < columns, other=-1)
    slot = group * GROUP + column % GROUP
    seen = (group >= 0) & (slot >= first) & (slot < last)
    if POOLED:
        seen &= tl.load(member_ptr + line * ordinals + (slot - first) // block, mask=seen, other=0) != 0
    score = tl.load(score_ptr + line * columns + column, mask=seen, other=float("-inf"))
    _write_highest(score, slot, out_ptr + line * k, k, SIZE, K)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "columns"])
def choose_blocks(
    score_ptr, first_ptr, last_ptr, out_ptr,
    batch0, row0, rows, R, columns, block, k,
    SIZE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Write the k blocks with the highest maximum scores. Blocks have `block` slots and are counted from the first slot
    that a row sees; the newest block is always chosen."""
    line, first, last = _row(first_ptr, last_ptr, batch0, row0, rows, R)
    ordinal = tl.arange(0, SIZE)
    best = tl.full((SIZE,), float("-inf"), tl.float32)
    for place in range(block):
        slot = first + ordinal * block + place
        score = tl.load(score_ptr + line * columns + slot, mask=slot < last, other=float("-inf"))
        best = tl.where(score > best, score, best)  # false for NaN
    newest = (first < last) & (ordinal == (last - 1 - first) // block)
    _write_highest(tl.where(newest, float("inf"), best), ordinal, out_ptr + line * k, k, SIZE, K)


@triton.jit
def _row(first_ptr, last_ptr, batch0, row0, rows, R):
    """Return this program's line in the buffers, and the range of slots that its row sees."""
    line = tl.program_id(0).to(tl.int64)
    row = (batch0 + line // rows) * R + row0 + line % rows
    return line, tl.load(first_ptr + row).to(tl.int32), tl.load(last_ptr + row).to(tl.int32)


@triton.jit
def _write_highest(score, name, out_ptr, k, SIZE: tl.constexpr, K: tl.constexpr):
    """Write the elements of `name` at the k highest scores, in the order of their places, then -1 up to k.

    Scores of -inf and NaN are never chosen; of equal scores, the first are. The k-th highest score is found bit by bit,
    from the highest bit: a bit is set if at least k scores are not less than the number with it. Scores are compared as
    unsigned integers of the same order, with 0 for -inf and NaN. If at most k scores are valid, there is no search.
    """
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    order = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    order = tl.where(score > float("-inf"), order, 0)
    kth, bit = tl.full((), 0, tl.uint32), tl.full((), 0x80000000, tl.uint32)
    for _ in range(tl.where(tl.sum((order > 0).to(tl.int32), 0) > k, 32, 0)):
        kth = tl.where(tl.sum((order >= (kth | bit)).to(tl.int32), 0) >= k, kth | bit, kth)
        bit = bit >> 1
    above = order > kth
    equal = (order == kth) & (order > 0)
    room = k - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    place = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(out_ptr + place - 1, name, mask=chosen)
    column = tl.arange(0, K)
    tl.store(out_ptr + column, -1, mask=(column >= tl.max(place, 0)) & (column < k))
