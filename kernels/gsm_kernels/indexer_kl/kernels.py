"""Triton kernels of the teacher's attention mass, its divergence from the indexer's distribution, and the gradients.

A launch takes a chunk of rows, as in `gsm_kernels.index_top_k.kernels`; its buffers have one line per row.

Letters: H heads, C channels, W width of the window, E window entries, F slots and R rows of a sequence, K selected
slots per row. Queries are rotated, and scaled by log2(e) / sqrt(C), so that logits are in base 2.
"""

# pyright: reportGeneralTypeIssues=false
# By Triton's type hints, a call of one kernel from another does not return.

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32


@triton.jit(do_not_specialize=["row0", "rows"])
def rotate(
    query_ptr, cos_ptr, sin_ptr, out_ptr,
    row0, rows, scale, P,
    H: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write queries [rows,H,C], from row `row0` of [B*R] on, rotated by their angles and multiplied by `scale`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < rows.to(tl.int64) * (H * C)
    row, channel = row0 + at // (H * C), at % C
    source = query_ptr + row0.to(tl.int64) * (H * C)
    own = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + (at ^ 1), mask=inside, other=0.0).to(tl.float32)
    turned = inside & (channel >= C - 2 * P)
    angle = row * P + (channel - (C - 2 * P)) // 2
    cos = tl.load(cos_ptr + angle, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (own * cos + tl.where(channel % 2 == 1, sin, -sin) * other) * scale, mask=inside)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "E", "F", "W", "row_tiles", "ordinals"])
def normaliser(
    query_ptr, window_ptr, bank_ptr, sink_ptr, position_ptr, first_ptr, last_ptr, member_ptr, out_ptr,
    batch0, row0, rows, R, E, F, W, row_tiles, ordinals, block,
    H: tl.constexpr, C: tl.constexpr, POOLED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS:
    tl.constexpr,
):  # fmt: skip
    """Write log2 of the softmax denominator of one head, over window, visible slots and sink, [lines, H]."""
    head = tl.program_id(0) % H
    tile = tl.program_id(0) // H
    batch, at, inside, line = tile_rows(tile, row_tiles, batch0, rows, ROWS)
    query = entries(query_ptr, line.to(tl.int64) * H + head, inside, C, WIDTH)
    position, first, last = sight(position_ptr, first_ptr, last_ptr, batch * R + row0 + at, inside, F)
    place = E - R + row0 + at
    reach = place - tl.minimum(position, W - 1)
    top = tl.zeros((ROWS,), tl.float32) + tl.maximum(tl.load(sink_ptr + head).to(tl.float32) * LOG2E, -1e30)
    total = tl.full((ROWS,), 1.0, tl.float32)
    begin = tl.maximum(tl.min(tl.where(inside & (position >= 0), reach, E), 0), 0)
    for start in range(begin, tl.minimum(tl.max(place, 0) + 1, E), SLOTS):
        entry = start + tl.arange(0, SLOTS)
        logit = _logits(query, window_ptr, batch * E + entry, entry < E, C, WIDTH)
        seen = (entry[None, :] >= reach[:, None]) & (entry[None, :] <= place[:, None]) & (position >= 0)[:, None]
        top, total = _add(top, total, tl.where(seen, logit, float("-inf")))
    for start in range(tl.min(first, 0), tl.max(last, 0), SLOTS):
        slot = start + tl.arange(0, SLOTS)
        logit = _logits(query, bank_ptr, batch * F + slot, slot < F, C, WIDTH)
        seen = _seen(slot, first, last, member_ptr, line, ordinals, block, POOLED)
        top, total = _add(top, total, tl.where(seen, logit, float("-inf")))
    tl.store(out_ptr + line.to(tl.int64) * H + head, top + tl.log2(total), mask=inside)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "row_tiles", "slot_tiles", "ordinals"])
def mass_of_visible(
    query_ptr, bank_ptr, normaliser_ptr, position_ptr, first_ptr, last_ptr, member_ptr, mass_ptr,
    batch0, row0, rows, R, F, row_tiles, slot_tiles, ordinals, block,
    H: tl.constexpr, C: tl.constexpr, POOLED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS:
    tl.constexpr,
):  # fmt: skip
    """Write a tile of the teacher's mass [lines, F], summed over heads; 0 outside a row's pool.

    A tile is skipped if none of its rows sees a slot of it. Values outside a row's range are undefined.
    """
    tile = tl.program_id(0) // slot_tiles
    start = (tl.program_id(0) % slot_tiles) * SLOTS
    batch, at, inside, line = tile_rows(tile, row_tiles, batch0, rows, ROWS)
    position, first, last = sight(position_ptr, first_ptr, last_ptr, batch * R + row0 + at, inside, F)
    if (tl.max(last, 0) > start) & (tl.min(first, 0) < start + SLOTS):
        slot = start + tl.arange(0, SLOTS)
        entry = entries(bank_ptr, batch * F + slot, slot < F, C, WIDTH)
        mass = tl.zeros((ROWS, SLOTS), tl.float32)
        for head in range(H):
            query = entries(query_ptr, line.to(tl.int64) * H + head, inside, C, WIDTH)
            below = tl.load(normaliser_ptr + line.to(tl.int64) * H + head, mask=inside, other=0.0)
            mass += tl.exp2(tl.dot(query, tl.trans(entry), input_precision="ieee") - below[:, None])
        if POOLED:
            mass = tl.where(_seen(slot, first, last, member_ptr, line, ordinals, block, POOLED), mass, 0.0)
        # int32 is enough: the buffers of a chunk are small.
        out = line[:, None] * F + slot[None, :]
        tl.store(mass_ptr + out, mass, mask=inside[:, None] & (slot < F)[None, :])


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "E", "F", "W", "K"])
def mass_of_selected(
    query_ptr, window_ptr, bank_ptr, sink_ptr, position_ptr, index_ptr, mass_ptr,
    batch0, row0, rows, R, E, F, W, K,
    H: tl.constexpr, C: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write the teacher's mass on the slots selected for a row, [lines, K]. A program takes all heads of one row."""
    line = tl.program_id(0).to(tl.int64)
    batch = batch0 + line // rows
    row = batch * R + row0 + line % rows
    position = tl.load(position_ptr + row).to(tl.int32)
    head = tl.arange(0, HEADS)
    query = entries(query_ptr, line * H + head, head < H, C, WIDTH)
    top = tl.maximum(tl.load(sink_ptr + head, mask=head < H, other=0.0).to(tl.float32) * LOG2E, -1e30)
    total = tl.full((HEADS,), 1.0, tl.float32)
    place = (E - R + row0 + line % rows).to(tl.int32)
    known = tl.where(position < 0, 0, K)
    for start in range(tl.maximum(place - tl.minimum(position, W - 1), 0), tl.where(position < 0, 0, place + 1), SLOTS):
        entry = start + tl.arange(0, SLOTS)
        logit = _logits(query, window_ptr, batch * E + entry, entry <= place, C, WIDTH)
        top, total = _add(top, total, tl.where((entry <= place)[None, :], logit, float("-inf")))
    for start in range(0, K, SLOTS):
        column = start + tl.arange(0, SLOTS)
        slot = tl.load(index_ptr + line * K + column, mask=column < known, other=-1)
        logit = _logits(query, bank_ptr, batch * F + slot, slot >= 0, C, WIDTH)
        top, total = _add(top, total, tl.where((slot >= 0)[None, :], logit, float("-inf")))
    below = top + tl.log2(total)
    for start in range(0, K, SLOTS):
        column = start + tl.arange(0, SLOTS)
        slot = tl.load(index_ptr + line * K + column, mask=column < known, other=-1)
        logit = _logits(query, bank_ptr, batch * F + slot, slot >= 0, C, WIDTH)
        share = tl.where((head < H)[:, None] & (slot >= 0)[None, :], tl.exp2(logit - below[:, None]), 0.0)
        tl.store(mass_ptr + line * K + column, tl.sum(share, 0), mask=column < K)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "columns", "K"])
def divergence(
    mass_ptr, score_ptr, position_ptr, first_ptr, last_ptr, index_ptr, loss_ptr, held_ptr, sees_ptr,
    batch0, row0, rows, R, columns, K,
    DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row's KL(mass / sum of mass || softmax of scores), the share of the mass on its selected slots, and
    whether it sees a slot. Overwrite its scores by their gradient. If the mass is 0, loss and gradient are 0."""
    line = tl.program_id(0).to(tl.int64)
    row = (batch0 + line // rows) * R + row0 + line % rows
    live = tl.load(position_ptr + row) >= 0
    begin, end = tl.full((), 0, tl.int32), tl.zeros((), tl.int32) + columns
    if DENSE:
        begin, end = tl.load(first_ptr + row).to(tl.int32), tl.load(last_ptr + row).to(tl.int32)
    known = tl.where(live, end, 0)
    mass_ptr += line * columns
    score_ptr += line * columns
    index_ptr += line * K
    mass_sum = tl.zeros((BLOCK,), tl.float32)
    top, total = tl.full((1,), -1e30, tl.float32), tl.zeros((1,), tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mass, score = _compared(mass_ptr, score_ptr, index_ptr, column, column < known, DENSE)
        mass_sum += mass
        top, total = _add(top, total, (score * LOG2E)[None, :])
    whole = tl.sum(mass_sum, 0)
    sees = tl.where(whole > 0, 1.0, 0.0)
    share = 1.0 / tl.maximum(whole, TINY)
    below = tl.sum(top + tl.log2(tl.maximum(total, TINY)), 0)
    loss = tl.zeros((BLOCK,), tl.float32)
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mass, score = _compared(mass_ptr, score_ptr, index_ptr, column, column < known, DENSE)
        target = mass * share
        log_model = score * LOG2E - below
        loss += target * (tl.log2(tl.maximum(target, TINY)) - tl.where(target > 0, log_model, 0.0))
        tl.store(score_ptr + column, tl.exp2(log_model) * sees - target, mask=column < end)
    tl.store(loss_ptr + row, tl.sum(loss, 0) * LN2)
    if DENSE:
        held = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, K, BLOCK):
            column = start + tl.arange(0, BLOCK)
            slot = tl.load(index_ptr + column, mask=column < K, other=-1)
            held += tl.load(mass_ptr + slot, mask=(slot >= begin) & (slot < known), other=0.0)
        tl.store(held_ptr + row, tl.sum(held, 0) * share)
        tl.store(sees_ptr + row, tl.where(tl.sum(total, 0) > 0, 1.0, 0.0))


@triton.jit
def tile_rows(tile, row_tiles, batch0, rows, ROWS: tl.constexpr):
    """Return a tile's sequence, its rows within the chunk, the mask of existing rows, and their lines."""
    batch = (batch0 + tile // row_tiles).to(tl.int64)
    at = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
    return batch, at, at < rows, (tile // row_tiles) * rows + at


@triton.jit
def sight(position_ptr, first_ptr, last_ptr, row, inside, F):
    """Return the positions of rows, and the ranges of slots that they see; padding has an empty range at F."""
    position = tl.load(position_ptr + row, mask=inside, other=-1).to(tl.int32)
    first = tl.load(first_ptr + row, mask=inside & (position >= 0), other=F).to(tl.int32)
    last = tl.load(last_ptr + row, mask=inside & (position >= 0), other=0).to(tl.int32)
    return position, first, last


@triton.jit
def _seen(slot, first, last, member_ptr, line, ordinals, block, POOLED: tl.constexpr):
    """Return which slots the rows see: those in their range, and in their pool if there are pools."""
    seen = (slot[None, :] >= first[:, None]) & (slot[None, :] < last[:, None])
    if POOLED:
        ordinal = (slot[None, :] - first[:, None]) // block
        seen &= tl.load(member_ptr + (line[:, None] * ordinals + ordinal), mask=seen, other=0) != 0
    return seen


@triton.jit
def entries(entry_ptr, at, there, C: tl.constexpr, WIDTH: tl.constexpr):
    """Load the entries [places, WIDTH] at `at`, 0 where `there` is false and beyond C channels."""
    channel = tl.arange(0, WIDTH)
    inside = there[:, None] & (channel < C)[None, :]
    return tl.load(entry_ptr + at.to(tl.int64)[:, None] * C + channel[None, :], mask=inside, other=0.0)


@triton.jit
def _logits(query, entry_ptr, at, there, C: tl.constexpr, WIDTH: tl.constexpr):
    return tl.dot(query, tl.trans(entries(entry_ptr, at, there, C, WIDTH)), input_precision="ieee")


@triton.jit
def _add(top, total, logit):
    """Add 2^logit to an online sum, which is total * 2^top; a logit of -inf adds 0."""
    higher = tl.maximum(top, tl.max(logit, 1))
    return higher, total * tl.exp2(top - higher) + tl.sum(tl.exp2(logit - higher[:, None]), 1)


@triton.jit
def _compared(mass_ptr, score_ptr, index_ptr, column, inside, DENSE: tl.constexpr):
    """Load mass and score of columns; 0 and -inf where there is no slot."""
    if not DENSE:
        inside &= tl.load(index_ptr + column, mask=inside, other=-1) >= 0
    mass = tl.load(mass_ptr + column, mask=inside, other=0.0)
    return mass, tl.load(score_ptr + column, mask=inside, other=float("-inf"))


# Gradients of the indexer with `dense`, from the gradient of the scores [lines, F]. The products query . key are
# computed again.


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "row_tiles"])
def query_gradients(
    query_ptr, weight_ptr, key_ptr, grad_ptr, position_ptr, first_ptr, last_ptr, query_grad_ptr, weight_grad_ptr,
    batch0, row0, rows, R, F, row_tiles,
    J: tl.constexpr, I: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Write the gradients of queries and weights of one index head, for a tile of rows."""
    head = tl.program_id(0) % J
    tile = tl.program_id(0) // J
    batch, at, inside, line = tile_rows(tile, row_tiles, batch0, rows, ROWS)
    row = batch * R + row0 + at
    position, first, last = sight(position_ptr, first_ptr, last_ptr, row, inside, F)
    query = entries(query_ptr, row * J + head, inside, I, WIDTH)
    weight = tl.load(weight_ptr + row * J + head, mask=inside, other=0.0).to(tl.float32)
    query_grad = tl.zeros((ROWS, WIDTH), tl.float32)
    weight_grad = tl.zeros((ROWS,), tl.float32)
    for start in range(tl.min(first, 0), tl.max(last, 0), SLOTS):
        slot = start + tl.arange(0, SLOTS)
        seen = (slot[None, :] >= first[:, None]) & (slot[None, :] < last[:, None])
        key = entries(key_ptr, batch * F + slot, slot < F, I, WIDTH)
        product = tl.dot(query, tl.trans(key), input_precision="ieee")
        grad = tl.load(grad_ptr + (line[:, None] * F + slot[None, :]), mask=seen, other=0.0)
        weight_grad += tl.sum(tl.maximum(product, 0.0) * grad, 1)
        # The derivative of relu is 1 where the product is positive.
        fired_grad = tl.where(product > 0, weight[:, None] * grad, 0.0).to(key.dtype)
        query_grad += tl.dot(fired_grad, key, input_precision="ieee")
    channel = tl.arange(0, WIDTH)
    inside_2d = inside[:, None] & (channel < I)[None, :]
    tl.store(query_grad_ptr + (row * J + head)[:, None] * I + channel[None, :], query_grad, mask=inside_2d)
    tl.store(weight_grad_ptr + row * J + head, weight_grad, mask=inside)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "slot_tiles", "splits", "batches"])
def key_gradients(
    query_ptr, weight_ptr, key_ptr, grad_ptr, position_ptr, first_ptr, last_ptr, part_ptr,
    batch0, row0, rows, R, F, slot_tiles, splits, batches,
    J: tl.constexpr, I: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Write the gradient of a tile of keys from one of `splits` parts of the rows, float32 [splits, batches, F, I]."""
    slot = (tl.program_id(0) % slot_tiles) * SLOTS + tl.arange(0, SLOTS)
    sequence = (tl.program_id(0) // slot_tiles) % batches
    split = tl.program_id(0) // slot_tiles // batches
    batch = (batch0 + sequence).to(tl.int64)
    key = entries(key_ptr, batch * F + slot, slot < F, I, WIDTH)
    key_grad = tl.zeros((SLOTS, WIDTH), tl.float32)
    for tile in range(split, tl.cdiv(rows, ROWS), splits):
        at = tile * ROWS + tl.arange(0, ROWS)
        inside = at < rows
        row = batch * R + row0 + at
        position, first, last = sight(position_ptr, first_ptr, last_ptr, row, inside, F)
        if (tl.max(last, 0) > tl.min(slot, 0)) & (tl.min(first, 0) <= tl.max(slot, 0)):
            seen = (slot[:, None] >= first[None, :]) & (slot[:, None] < last[None, :])
            line = sequence * rows + at
            grad = tl.load(grad_ptr + (line[None, :] * F + slot[:, None]), mask=seen, other=0.0)
            for head in range(J):
                query = entries(query_ptr, row * J + head, inside, I, WIDTH)
                weight = tl.load(weight_ptr + row * J + head, mask=inside, other=0.0).to(tl.float32)
                product = tl.dot(key, tl.trans(query), input_precision="ieee")
                fired_grad = tl.where(product > 0, weight[None, :] * grad, 0.0).to(query.dtype)
                key_grad += tl.dot(fired_grad, query, input_precision="ieee")
    channel = tl.arange(0, WIDTH)
    out = ((split * batches + sequence).to(tl.int64) * F + slot)[:, None] * I + channel[None, :]
    tl.store(part_ptr + out, key_grad, mask=(slot < F)[:, None] & (channel < I)[None, :])
