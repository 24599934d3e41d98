"""Triton kernels of index scores of listed slots, and their gradients.

A launch takes a chunk of rows, as in `gsm_kernels.index_top_k.kernels`. A place is an element of a row's list.

Letters: J index heads, I their width, F slots and R rows of a sequence, KS places that are computed at a time.
"""

# pyright: reportGeneralTypeIssues=false
# By Triton's type hints, a call of one kernel from another does not return.

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "places"])
def forward(
    query_ptr, weight_ptr, key_ptr, index_ptr, score_ptr,
    batch0, row0, rows, R, F, places,
    J: tl.constexpr, I: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, KS:  # noqa: E741
    tl.constexpr,
):  # fmt: skip
    """Compute score = sum_j weight_j relu(query_j . key), 0 where there is no slot.

    With GROUP > 1, the index lists groups of neighbouring slots, and the places of a row are all slots of its groups.
    """
    tiles = tl.cdiv(places, KS)
    line = (tl.program_id(0) // tiles).to(tl.int64)
    batch = batch0 + line // rows
    row = batch * R + row0 + line % rows
    place = (tl.program_id(0) % tiles) * KS + tl.arange(0, KS)
    query, weight = _heads(query_ptr, weight_ptr, row, J, I, HEADS, WIDTH)
    group = tl.load(index_ptr + line * (places // GROUP) + place // GROUP, mask=place < places, other=-1)
    slot = group * GROUP + place % GROUP
    valid = (group >= 0) & (slot < F)
    key = _keys(key_ptr, batch * F + slot, valid, I, WIDTH)
    fired = tl.maximum(tl.dot(key, tl.trans(query), input_precision="ieee"), 0.0, tl.PropagateNan.ALL)
    score = tl.where(valid, tl.sum(fired * weight[None, :], 1), 0.0)
    tl.store(score_ptr + line * places + place, score, mask=place < places)


@triton.jit
def _heads(query_ptr, weight_ptr, row, J: tl.constexpr, I: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):  # noqa: E741
    """Load a row's queries [HEADS, WIDTH] and weights [HEADS], 0 beyond J heads and I channels."""
    head, channel = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    inside = (head < J)[:, None] & (channel < I)[None, :]
    query = tl.load(query_ptr + (row * J + head)[:, None] * I + channel[None, :], mask=inside, other=0.0)
    return query, tl.load(weight_ptr + row * J + head, mask=head < J, other=0.0).to(tl.float32)


@triton.jit
def _keys(key_ptr, entry, there, I: tl.constexpr, WIDTH: tl.constexpr):  # noqa: E741
    """Load the keys at `entry` (counted over all sequences), [places, WIDTH], 0 where `there` is false."""
    channel = tl.arange(0, WIDTH)
    inside = there[:, None] & (channel < I)[None, :]
    return tl.load(key_ptr + entry.to(tl.int64)[:, None] * I + channel[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["batch0", "row0", "rows", "R", "F", "places"])
def backward(
    query_ptr, weight_ptr, key_ptr, index_ptr, grad_ptr, query_grad_ptr, weight_grad_ptr, pair_ptr,
    batch0, row0, rows, R, F, places,
    J: tl.constexpr, I: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, KS: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Write the gradients of a row's queries and weights, and the contribution of each place to its key's gradient."""
    line = tl.program_id(0).to(tl.int64)
    batch = batch0 + line // rows
    row = batch * R + row0 + line % rows
    query, weight = _heads(query_ptr, weight_ptr, row, J, I, HEADS, WIDTH)
    query_grad = tl.zeros((HEADS, WIDTH), tl.float32)
    weight_grad = tl.zeros((HEADS,), tl.float32)
    head, channel = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    for start in range(0, places, KS):
        place = start + tl.arange(0, KS)
        slot = tl.load(index_ptr + line * places + place, mask=place < places, other=-1)
        valid = slot >= 0
        key = _keys(key_ptr, batch * F + slot, valid, I, WIDTH)
        product = tl.dot(key, tl.trans(query), input_precision="ieee")
        grad = tl.load(grad_ptr + line * places + place, mask=valid, other=0.0).to(tl.float32)
        weight_grad += tl.sum(tl.maximum(product, 0.0) * grad[:, None], 0)
        # The derivative of relu is 1 where the product is positive.
        fired_grad = tl.where(product > 0, grad[:, None] * weight[None, :], 0.0).to(query.dtype)
        query_grad += tl.dot(tl.trans(fired_grad), key, input_precision="ieee")
        pair = tl.dot(fired_grad, query, input_precision="ieee")
        inside = valid[:, None] & (channel < I)[None, :]
        tl.store(pair_ptr + (line * places + place)[:, None] * I + channel[None, :], pair, mask=inside)
    inside = (head < J)[:, None] & (channel < I)[None, :]
    tl.store(query_grad_ptr + (row * J + head)[:, None] * I + channel[None, :], query_grad, mask=inside)
    tl.store(weight_grad_ptr + row * J + head, weight_grad, mask=head < J)
