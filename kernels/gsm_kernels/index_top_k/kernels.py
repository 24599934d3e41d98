"""Index scores tile by tile, and the k highest of a row's scores, exactly.

Letters: J index heads, I their width, F slots, R rows of a sequence, of which a launch takes `rows` from `row0` on, of
all sequences from `batch0` on; its buffers hold one line per row. A program never meets a row of another sequence.
"""

# pyright: reportGeneralTypeIssues=false
# To a type checker, a jitted function that is called from another never returns.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "groups", "ordinals"])
def best_of_groups(
    query_ptr, weight_ptr, key_ptr, first_ptr, last_ptr, member_ptr, best_ptr,
    batch0, row0, rows, R, F, groups, ordinals, block,
    J: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, POOLED: tl.constexpr, WIDTH: tl.constexpr,  # noqa: E741
    ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The highest visible score among every GROUP neighbouring slots, -inf where none is visible.

    A program makes a tile of ROWS x SLOTS scores in registers, head after head. Tiles that none of their rows see are
    left out, and what they would have written stays undefined.
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
        line = (tile // row_tiles) * rows + at  # a chunk's buffers hold far fewer than 2^31 numbers
        if POOLED:
            ordinal = (slot[None, :] - first[:, None]) // block
            seen &= tl.load(member_ptr + (line[:, None] * ordinals + ordinal), mask=seen, other=0) != 0
        best = tl.where(seen, score, float("-inf"))
        group = start // GROUP + tl.arange(0, SLOTS // GROUP)
        if GROUP > 1:
            best = tl.where(best > float("-inf"), best, float("-inf"))  # as NaN is never chosen
            best = tl.max(tl.reshape(best, (ROWS, SLOTS // GROUP, GROUP)), 2)
        inside_2d = inside[:, None] & (group < groups)[None, :]
        tl.store(best_ptr + (line[:, None] * groups + group[None, :]), best, mask=inside_2d)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "columns"])
def choose(
    score_ptr, first_ptr, last_ptr, out_ptr,
    batch0, row0, rows, R, columns, k,
    GROUP: tl.constexpr, SPAN: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The k best of the groups (GROUP = 1: of the slots) that a row sees: the k best of SIZE spans of SPAN groups, then
    the k best of the groups of these. The list of the spans lies where that of the groups will."""
    line, first, last = _row(first_ptr, last_ptr, batch0, row0, rows, R)
    span, low, out = tl.arange(0, SIZE), first // GROUP, out_ptr + line * k
    end = tl.where(first < last, last, 0)
    score_ptr += line * columns + low
    if SPAN == 1:
        score = tl.load(score_ptr + span, mask=(low + span) * GROUP < end, other=float("-inf"))
        _write_highest(score, low + span, out, k, SIZE, K)
    else:
        best = tl.full((SIZE,), float("-inf"), tl.float32)
        for member in range(SPAN):  # one after the other, since all at once would fill the registers
            group = span * SPAN + member
            score = tl.load(score_ptr + group, mask=(low + group) * GROUP < end, other=float("-inf"))
            best = tl.where(score > best, score, best)  # NaN is not higher
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
    """The k best slots of the k groups that are listed for a row, given the scores of all their slots."""
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
    """The k blocks of `block` slots, counted from the first that a row sees, with the highest maxima; the newest is
    among them whatever its score."""
    line, first, last = _row(first_ptr, last_ptr, batch0, row0, rows, R)
    ordinal = tl.arange(0, SIZE)
    best = tl.full((SIZE,), float("-inf"), tl.float32)
    for place in range(block):
        slot = first + ordinal * block + place
        score = tl.load(score_ptr + line * columns + slot, mask=slot < last, other=float("-inf"))
        best = tl.where(score > best, score, best)  # NaN is not higher
    newest = (first < last) & (ordinal == (last - 1 - first) // block)
    _write_highest(tl.where(newest, float("inf"), best), ordinal, out_ptr + line * k, k, SIZE, K)


@triton.jit
def _row(first_ptr, last_ptr, batch0, row0, rows, R):
    """This program's line in the buffers, and the range of slots its row sees."""
    line = tl.program_id(0).to(tl.int64)
    row = (batch0 + line // rows) * R + row0 + line % rows
    return line, tl.load(first_ptr + row).to(tl.int32), tl.load(last_ptr + row).to(tl.int32)


@triton.jit
def _write_highest(score, name, out_ptr, k, SIZE: tl.constexpr, K: tl.constexpr):
    """Write the names of the k highest scores above -inf, which NaN is not, in their order, ties to the first, then -1
    up to k.

    The k-th highest is found bit by bit, from the highest: a bit is set where k scores or more reach the number so
    far with that bit set. Scores are compared as unsigned numbers of the same order, 0 standing for -inf and NaN. Where
    there are not more than k, all are taken and nothing is searched.
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
