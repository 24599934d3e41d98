"""Gradients of the indexer over all slots that a tile of rows sees, given the gradient of the scores [lines, F].

The scores are computed again. Letters as in `.kernels`.
"""

# pyright: reportGeneralTypeIssues=false
# To a type checker, a jitted function that is called from another never returns.

import triton
import triton.language as tl

from .kernels import entries, sight


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "row_tiles"])
def query_gradients(
    query_ptr,
    weight_ptr,
    key_ptr,
    grad_ptr,
    position_ptr,
    first_ptr,
    last_ptr,
    query_grad_ptr,
    weight_grad_ptr,
    batch0,
    row0,
    rows,
    R,
    F,
    row_tiles,
    J: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Gradients of one index head's queries and weights for a tile of rows, over all slots that these see."""
    head = tl.program_id(0) % J
    tile = tl.program_id(0) // J
    batch = (batch0 + tile // row_tiles).to(tl.int64)
    at = (tile % row_tiles) * ROWS + tl.arange(0, ROWS)
    inside = at < rows
    line = (tile // row_tiles) * rows + at
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
        # Where a head fired, its gradient is its weight times the score's.
        fired_grad = tl.where(product > 0, weight[:, None] * grad, 0.0).to(key.dtype)
        query_grad += tl.dot(fired_grad, key, input_precision="ieee")
    channel = tl.arange(0, WIDTH)
    inside_2d = inside[:, None] & (channel < I)[None, :]
    tl.store(query_grad_ptr + (row * J + head)[:, None] * I + channel[None, :], query_grad, mask=inside_2d)
    tl.store(weight_grad_ptr + row * J + head, weight_grad, mask=inside)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "slot_tiles", "splits", "batches"])
def key_gradients(
    query_ptr,
    weight_ptr,
    key_ptr,
    grad_ptr,
    position_ptr,
    first_ptr,
    last_ptr,
    part_ptr,
    batch0,
    row0,
    rows,
    R,
    F,
    slot_tiles,
    splits,
    batches,
    J: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Gradients of a tile of keys, part by part of the rows: [splits, batches, F, I] in float32, to be summed."""
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
